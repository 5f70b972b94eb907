#include <pybind11/stl.h>

#include "common/options.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {
namespace {

/// A dict for each row, with name, default, accepted and help.
std::vector<py::dict> option_table() {
  std::vector<py::dict> table;
  for (const OptionRow& row : option_rows()) {
    py::dict entry;
    entry["name"] = row.name;
    entry["default"] = row.show(Options());
    entry["accepted"] = row.accepted;
    entry["help"] = row.help;
    table.push_back(std::move(entry));
  }
  return table;
}

py::dict show(const Options& options) {
  py::dict values;
  for (const OptionRow& row : option_rows()) values[row.name] = row.show(options);
  return values;
}

Options parse_dict(const std::map<std::string, std::string>& environment) {
  return parse_options([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

}  // namespace

void bind_options(py::module_& module) {
  module.def("option_table", &option_table, "The rows that document the environment variables.");
  module.def(
      "option_values", [] { return show(options()); },
      "The options in force, by variable. Raises ValueError if a variable has a value that is not accepted.");
  module.def(
      "parse_options",
      [](const std::map<std::string, std::string>& environment) { return show(parse_dict(environment)); },
      py::arg("environment"),
      "The options that `environment` would give, by variable. Raises ValueError like option_values().");
}

}  // namespace ours
