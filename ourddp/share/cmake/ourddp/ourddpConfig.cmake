# find_package(ourddp) defines the target ourddp::ourddp, for programs that include <ourddp/ourddp.h>. It brings torch.
#
# torch's own find_package(Torch) is not used, since for a torch with CUDA it needs a CUDA toolkit, which neither torch
# nor ourddp needs to run. ourddp_TORCH may name torch's folder; otherwise it is looked for in CMAKE_PREFIX_PATH and
# beside this package.

get_filename_component(_ourddp "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

macro(_ourddp_refuse _why)
  set(ourddp_FOUND FALSE)
  set(ourddp_NOT_FOUND_MESSAGE "${_why}")
  return()
endmacro()

# A build writes this file last.
if(NOT EXISTS "${_ourddp}/_build_info.py" OR NOT EXISTS "${_ourddp}/libourddp.so")
  _ourddp_refuse("ourddp has not been built in ${_ourddp}. Run 'make build' or 'pip install .' in its source folder.")
endif()
file(STRINGS "${_ourddp}/_build_info.py" _line REGEX "^TORCH_VERSION = ")
string(REGEX MATCH "[0-9][0-9.a-z]*" _built_for "${_line}")

find_path(ourddp_TORCH share/cmake/Torch/TorchConfigVersion.cmake
  HINTS ${CMAKE_PREFIX_PATH} "${_ourddp}/../torch" PATH_SUFFIXES .. ../.. DOC "The folder of the package torch")
if(NOT ourddp_TORCH)
  _ourddp_refuse("ourddp needs torch ${_built_for}, which was not found. \
Configure with -DCMAKE_PREFIX_PATH=\"$(python -m ourddp cmake-prefix)\".")
endif()

get_filename_component(_torch "${ourddp_TORCH}" ABSOLUTE)
set(PACKAGE_FIND_VERSION "")
include("${_torch}/share/cmake/Torch/TorchConfigVersion.cmake")
string(REGEX REPLACE "\\+.*" "" _found "${PACKAGE_VERSION}")
if(NOT _found STREQUAL _built_for)
  _ourddp_refuse("ourddp was built for torch ${_built_for}, but torch ${_found} is in ${_torch}. Rebuild ourddp \
with 'pip install --no-build-isolation .' in its source folder, or set ourddp_TORCH to the folder of that torch.")
endif()

if(NOT TARGET ourddp::ourddp)
  add_library(ourddp::ourddp SHARED IMPORTED)
  set_target_properties(ourddp::ourddp PROPERTIES
    IMPORTED_LOCATION "${_ourddp}/libourddp.so"
    IMPORTED_SONAME libourddp.so)
  target_include_directories(ourddp::ourddp SYSTEM INTERFACE
    "${_ourddp}/include" "${_torch}/include" "${_torch}/include/torch/csrc/api/include")
  # torch's headers ask for the C++ standard of their version.
  if(_built_for VERSION_LESS 2.12)
    target_compile_features(ourddp::ourddp INTERFACE cxx_std_17)
  else()
    target_compile_features(ourddp::ourddp INTERFACE cxx_std_20)
  endif()
  # libtorch.so brings the kernels for CUDA if torch has them, though no symbol of it is used.
  target_link_libraries(ourddp::ourddp INTERFACE
    "-Wl,--no-as-needed" "${_torch}/lib/libtorch.so" "-Wl,--as-needed"
    "${_torch}/lib/libtorch_cpu.so" "${_torch}/lib/libc10.so")
endif()
