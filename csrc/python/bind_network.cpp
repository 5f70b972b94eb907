#include <pybind11/stl.h>

#include "common/machine_share.h"
#include "common/network_interfaces.h"
#include "common/options.h"
#include "python/bind.h"
#include "transport/node/node_probe.h"
#include "transport/tcp/tcp_congestion.h"

namespace py = pybind11;

namespace ours {
namespace {

py::list interfaces() {
  py::list found;
  for (const InterfaceAddress& one : interface_addresses()) {
    found.append(py::make_tuple(one.name, one.address.host(), one.loopback));
  }
  return found;
}

/// What TcpListener listens at.
std::vector<std::string> hosts_of_this_process(const std::string& master) {
  std::vector<std::string> hosts;
  for (const SocketAddress& one : own_addresses(options().interface, master).addresses) hosts.push_back(one.host());
  return hosts;
}

}  // namespace

void bind_network(py::module_& module) {
  module.def("interfaces", &interfaces,
             "Name, address and whether it is loopback, for each address of the interfaces that are up.");
  module.def(
      "own_addresses", &hosts_of_this_process, py::arg("master"), py::call_guard<py::gil_scoped_release>(),
      "The addresses at which ranks of other nodes would reach this process. Raises ValueError if OURS_INTERFACE "
      "matches none, and RuntimeError if there is no route to the master.");
  module.def(
      "near_congestion_control",
      [](const std::string& asked, const std::string& usual, const std::string& allowed) {
        return TcpCongestion(asked, {usual, allowed}).at_first();
      },
      py::arg("asked"), py::arg("usual"), py::arg("allowed"),
      "The congestion control of connections to near peers; empty: the system's.");
  module.def(
      "memory_left",
      [] {
        const std::optional<MemoryRoom> room = memory_room();
        return room ? std::optional(room->bytes) : std::nullopt;
      },
      "The bytes that this process may still take before the machine or a control group runs out of memory, or None.");
  py::class_<NodeProbe>(module, "NodeProbe",
                        "A little memory by which others see whether they share memory with this "
                        "process.")
      .def(py::init<>())
      .def("address", &NodeProbe::address)
      .def_static("obstacle", &NodeProbe::obstacle, py::arg("address"));
}

}  // namespace ours
