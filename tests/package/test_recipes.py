"""The recipes for clusters can be read by the programs that they are for, and have the version of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import ourddp

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_easybuild_reads_its_recipe():
    from easybuild.framework.easyconfig.parser import EasyConfigParser
    from easybuild.tools.options import set_up_configuration

    (recipe,) = (RECIPES / "easybuild").glob("*.eb")
    set_up_configuration(args=["--allow-use-as-root-and-accept-consequences"], silent=True)
    read = EasyConfigParser(str(recipe)).get_config_dict()
    assert (read["name"], read["version"]) == ("ourddp", ourddp.__version__)
    assert recipe.name == "ourddp-{version}-{toolchain[name]}-{toolchain[version]}.eb".format(**read)


def test_apptainer_has_a_recipe_with_all_sections():
    from spython.main.parse.parsers import SingularityParser

    (recipe,) = SingularityParser(str(RECIPES / "apptainer" / "ourddp.def")).parse().values()
    assert recipe.fromHeader == "python:3.12-slim-bookworm"
    assert any(f"ourddp-{ourddp.__version__}.tar.gz" in file for file in recipe.files)
    assert any(line.startswith("pip install") and "[examples]" in line for line in recipe.install)


def test_the_module_file_is_lua():
    from luaparser import ast as lua

    text = (RECIPES / "modules" / f"{ourddp.__version__}.lua").read_text()
    called = {node.func.id for node in lua.walk(lua.parse(text)) if type(node).__name__ == "Call"}
    assert {"conflict", "prepend_path", "whatis"} <= called


def test_the_recipe_for_spack_is_python_and_has_the_version():
    (recipe,) = (
        node for node in ast.parse((RECIPES / "spack" / "package.py").read_text()).body if hasattr(node, "bases")
    )
    assert (recipe.name, recipe.bases[0].id) == ("PyOurddp", "PythonPackage")
    assert f'version("{ourddp.__version__}")' in ast.unparse(recipe).replace("'", '"')
