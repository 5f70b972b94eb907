#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "common/launch.h"
#include "python/bind.h"

namespace py = pybind11;

namespace ours {
namespace {

py::dict as_dict(const Launch& launch) {
  py::dict fields;
  fields["launcher"] = launch.launcher;
  fields["rank"] = launch.rank;
  fields["world_size"] = launch.world_size;
  fields["local_rank"] = launch.local_rank;
  fields["local_world_size"] = launch.local_world_size;
  fields["master_addr"] = launch.master_addr;
  fields["master_port"] = launch.master_port;
  return fields;
}

}  // namespace

void bind_launch(py::module_& module) {
  module.def(
      "find_launch", [](const std::function<std::string(const char*)>& lookup) { return as_dict(find_launch(lookup)); },
      py::arg("lookup"),
      "The fields of ourddp.Launch for an environment: lookup(name) returns a variable, or an empty string. Raises "
      "ValueError.");
}

}  // namespace ours
