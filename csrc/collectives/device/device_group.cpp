#include "collectives/device/device_group.h"

#include <vector>

#include "collectives/device/device_opening.h"
#include "collectives/device/ipc_group.h"
#include "collectives/device/staging_group.h"

namespace ours {

namespace {

/// All ranks' facts, by rank.
std::vector<DeviceFacts> exchange_facts(Group& host, const Call& call, const Device& device,
                                        const DeviceLibrary& library, DeviceEngine wish) {
  std::vector<DeviceFacts> facts;
  const std::vector<std::string> hardware = gather_texts(host, call, device.hardware());
  const std::vector<std::string> memory = gather_texts(host, call, std::to_string(device.memory_bytes()));
  for (std::string& identity : gather_texts(host, call, device.identity())) {
    const size_t r = facts.size();
    facts.push_back({std::move(identity), hardware[r], std::stoull(memory[r]), {}, "", DeviceEngine::Auto, ""});
  }
  // One letter for each rank's wish; the rest of the text is the reason.
  std::string mine(1, static_cast<char>('0' + static_cast<int>(wish)));
  for (const DeviceFacts& peer : facts) mine += device.reaches(peer.identity) ? 'y' : 'n';
  mine += library.why_no_vendor_group();
  const std::vector<std::string> texts = gather_texts(host, call, mine);
  for (size_t r = 0; r < texts.size(); ++r) {
    facts[r].wish = static_cast<DeviceEngine>(texts[r].at(0) - '0');
    for (size_t to = 0; to < texts.size(); ++to) facts[r].reaches.push_back(texts[r].at(1 + to) == 'y');
    facts[r].why_no_vendor = texts[r].substr(1 + texts.size());
  }
  return facts;
}

}  // namespace

MadeDeviceGroup make_device_group(const std::shared_ptr<Group>& host, const std::shared_ptr<Device>& device,
                                  DeviceLibrary& library, const Call& call, DeviceEngine wish) {
  try {
    std::vector<DeviceFacts> facts = exchange_facts(*host, call, *device, library, wish);
    const auto nodes = static_cast<int>(host->node_sizes().size());
    DeviceChoice choice = choose_device_engine(nodes, facts);
    if (choice.engine == DeviceEngine::Ipc) {
      auto memory = IpcMemory::share(*host, device, call, IpcGroup::stage_bytes(facts));
      if (memory->why_not().empty()) return {std::make_shared<IpcGroup>(host, device, std::move(memory)), choice};
      facts[0].why_not_mapped = memory->why_not();
      choice = choose_device_engine(nodes, facts);
    }
    if (choice.engine == DeviceEngine::Nccl) return {library.make_vendor_group(host, device, call.deadline), choice};
    return {std::make_shared<StagingGroup>(host, device), choice};
  } catch (...) {
    host->fail(std::current_exception());
    throw;
  }
}

}  // namespace ours
