#include "collectives/device/device_engine.h"

#include <map>

#include "collectives/call_record.h"
#include "common/error.h"
#include "device/device.h"

namespace ours {

namespace {

void check_wishes(const std::vector<DeviceFacts>& facts) {
  for (size_t r = 1; r < facts.size(); ++r) {
    if (facts[r].wish == facts[0].wish) continue;
    throw InvalidArgument(std::string("OURS_DEVICE_ENGINE is '") + name_of(facts[0].wish) + "' on rank 0 and '" +
                          name_of(facts[r].wish) + "' on " + rank_name(r) + "; give all ranks the same");
  }
}

// Why an engine cannot be used, or empty.

std::string why_no_nccl(const std::vector<DeviceFacts>& facts) {
  std::map<std::string, size_t> owners;
  for (size_t r = 0; r < facts.size(); ++r) {
    if (!facts[r].why_no_vendor.empty()) return "on " + rank_name(r) + ": " + facts[r].why_no_vendor;
    const auto [owner, is_first] = owners.try_emplace(facts[r].hardware, r);
    if (is_first) continue;
    const bool whole = facts[owner->second].identity == facts[r].identity;
    return rank_name(owner->second) + " and " + rank_name(r) +
           (whole ? " share a device" : " have parts of one device, which NCCL takes for the same");
  }
  return "";
}

std::string why_no_ipc(int nodes, const std::vector<DeviceFacts>& facts) {
  if (nodes > 1) return "the ranks are on " + std::to_string(nodes) + " nodes";
  if (facts.size() > kMostDeviceRanks) {
    return std::to_string(facts.size()) + " ranks are more than the " + std::to_string(kMostDeviceRanks) +
           " that a reduction on a device takes";
  }
  for (size_t r = 0; r < facts.size(); ++r) {
    for (size_t to = 0; to < facts.size(); ++to) {
      if (facts[r].identity == facts[to].identity || facts[r].reaches.at(to)) continue;
      return "the device of " + rank_name(r) + " cannot use the memory of that of " + rank_name(to);
    }
  }
  return facts[0].why_not_mapped;
}

}  // namespace

DeviceChoice choose_device_engine(int nodes, const std::vector<DeviceFacts>& facts) {
  check_wishes(facts);
  const std::string no_nccl = why_no_nccl(facts);
  const std::string no_ipc = why_no_ipc(nodes, facts);
  const auto wished = [](DeviceEngine engine, const std::string& why_not) {
    if (why_not.empty()) return DeviceChoice{engine, "OURS_DEVICE_ENGINE asks for it"};
    throw InvalidArgument(std::string("OURS_DEVICE_ENGINE is '") + name_of(engine) +
                          "', which is not possible: " + why_not + ". Choose another engine, or 'auto'");
  };
  switch (facts.at(0).wish) {
    case DeviceEngine::Nccl:
      return wished(DeviceEngine::Nccl, no_nccl);
    case DeviceEngine::Ipc:
      return wished(DeviceEngine::Ipc, no_ipc);
    case DeviceEngine::Staging:
      return wished(DeviceEngine::Staging, "");
    case DeviceEngine::Auto:
      break;
  }
  if (no_nccl.empty()) return {DeviceEngine::Nccl, "each rank has a device of its own"};
  if (no_ipc.empty()) return {DeviceEngine::Ipc, "all ranks reach each other's devices; no NCCL: " + no_nccl};
  return {DeviceEngine::Staging, "no NCCL: " + no_nccl + "; no ipc: " + no_ipc};
}

}  // namespace ours
