#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <future>

#include "support/device_contract.h"
#include "support/testing.h"

// What goes on while a stream is held by a gate, which the host has yet to open, and another thread calls what might
// wait for that stream.

namespace ours {
namespace {

using std::chrono::milliseconds;
using testing::OnDevice;

/// Copies and kernels for a while, each of which has to end soon.
bool work_goes_on(OnDevice& on) {
  const auto done = on.device->make_event();
  const auto enough = Deadline::after(milliseconds(300));
  while (!enough.passed()) {
    on.device->copy(on.at(1), on.pinned(), 64, on.stream());
    on.device->reduce({on.at(1)}, {on.at(0), on.at(1)}, 16, DType::Float32, {}, on.stream());
    on.device->copy(on.pinned(), on.at(1), 64, on.stream());
    done->record(on.stream());
    try {
      wait_reached(*done, Deadline::after(milliseconds(2000)), nullptr, "a small kernel");
    } catch (const TimeoutError&) {
      return false;
    }
  }
  return true;
}

/// Whether it does while another thread makes that call, of the stream that is held.
bool work_goes_on_beside(OnDevice& on, const std::function<void(StreamHandle)>& call) {
  const auto held = on.device->make_stream();
  const auto gate = on.device->make_gate();
  gate->hold(held->handle());
  on.device->copy(on.at(2), on.at(0), 64, held->handle());
  std::future<void> other = std::async(std::launch::async, call, held->handle());
  std::future<bool> work = std::async(std::launch::async, [&] { return work_goes_on(on); });
  // Where it does not, the work itself may be in a call that waits.
  const bool ended = work.wait_for(milliseconds(4000)) == std::future_status::ready;
  gate->open();
  other.get();
  on.finish(held->handle());
  return work.get() && ended;
}

TEST(cuda_work_goes_on_while_a_stream_is_held_and_others_are_made) {
  OnDevice on(4096, 3);
  CHECK(work_goes_on_beside(on, [&](StreamHandle) { on.device->make_event(); }));
  CHECK(work_goes_on_beside(on, [&](StreamHandle) { on.device->make_stream(); }));
}

TEST(cuda_says_what_stops_while_a_stream_is_held) {
  OnDevice on(4096, 3);
  void* memory = nullptr;
  void* pinned = nullptr;
  CHECK_EQ(cudaMalloc(&memory, 4096), cudaSuccess);
  CHECK_EQ(cudaMallocHost(&pinned, 4096), cudaSuccess);
  const auto show = [&](const char* call, const std::function<void(StreamHandle)>& body) {
    std::printf("while a stream is held, and another thread is in %s, work %s\n", call,
                work_goes_on_beside(on, body) ? "goes on" : "STOPS");
  };
  // Sizes that no memory from before has.
  show("cudaMalloc", [&](StreamHandle) { on.device->memory(size_t{334} << 20); });
  show("cudaHostAlloc", [&](StreamHandle) { on.device->pinned_memory(size_t{34} << 20); });
  show("cudaFree", [&](StreamHandle) { cudaFree(memory); });
  show("cudaFreeHost", [&](StreamHandle) { cudaFreeHost(pinned); });
  show("launches of more kernels than the stream takes", [&](StreamHandle held) {
    for (int i = 0; i < on.device->more_than_a_stream_takes(); ++i) {
      on.device->reduce({on.at(2)}, {on.at(0), on.at(2)}, 16, DType::Float32, {}, held);
    }
  });
  show("cudaDeviceSynchronize", [](StreamHandle) { cudaDeviceSynchronize(); });
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace ours
