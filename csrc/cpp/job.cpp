#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "backend/process_group.h"
#include "common/launch.h"
#include "common/options.h"
#include "ourddp/ourddp.h"

namespace ourddp {

namespace {

/// torch's C++ interface changes between versions. Python's package checks it when it is imported.
void check_torch() {
  const uint64_t running = aoti_torch_abi_version();
  TORCH_CHECK(running == TORCH_ABI_VERSION, "ourddp was built for torch ", TORCH_VERSION, ", but torch ", running >> 56,
              ".", running >> 48 & 0xff, ".", running >> 40 & 0xff,
              " is running. Build ourddp and this program for that torch, or let the program find the other one.");
}

c10::intrusive_ptr<c10d::Store> make_store(const ours::Launch& launch, std::chrono::milliseconds timeout) {
  if (launch.launcher == "none") return c10::make_intrusive<c10d::HashStore>();
  // torchrun has a server of its own for its processes, which outlives them: a restart must not find old keys.
  const bool is_served = ours::launcher_variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.master_port);
  options.isServer = launch.rank == 0 && !is_served;
  options.numWorkers = static_cast<size_t>(launch.world_size);
  options.waitWorkers = false;  // the backend waits, and names those who do not come
  options.timeout = timeout;
  auto store = c10::make_intrusive<c10d::TCPStore>(launch.master_addr, options);
  if (!is_served) return store;
  const std::string attempt = ours::launcher_variable("TORCHELASTIC_RESTART_COUNT");
  return c10::make_intrusive<c10d::PrefixStore>("/ourddp/attempt_" + attempt, std::move(store));
}

}  // namespace

Job init(std::chrono::milliseconds timeout) {
  check_torch();
  const ours::Launch launch = ours::with_torch_errors("", [] { return ours::find_launch(ours::launcher_variable); });
  TORCH_CHECK_VALUE(launch.master_port <= UINT16_MAX, "MASTER_PORT is ", launch.master_port, ": ports end at ",
                    UINT16_MAX);
  const auto store = make_store(launch, timeout);
  const auto backend = c10::make_intrusive<ours::ProcessGroupOurs>(
      store, launch.rank, launch.world_size, c10::make_intrusive<ours::ProcessGroupOurs::Options>(timeout));
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, launch.rank, launch.world_size);
  const auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    group->setBackend(device, type, c10::intrusive_ptr<c10d::Backend>(backend));
  }
  group->setDefaultBackend(type);
  return {launch.launcher,         launch.rank,     launch.world_size, launch.local_rank,
          launch.local_world_size, std::move(group)};
}

}  // namespace ourddp
