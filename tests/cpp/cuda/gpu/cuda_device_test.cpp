#include <cuda_runtime_api.h>

#include <cstdio>

#include "device/device_library.h"
#include "support/device_contract.h"
#include "support/testing.h"

// Tests of what is specific to CUDA; other tests of devices are run with the same program.

namespace ours {
namespace {

using testing::OnDevice;

TEST(cuda_library_describes_itself_and_has_no_device_beyond_the_last) {
  DeviceLibrary* library = ours_device_library(kDeviceInterface);
  CHECK_CONTAINS(library->describe(), "CUDA ");
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, library->device(1000)), "there is no CUDA device 1000");
  CHECK_EQ(library->device(0), library->device(0));
}

TEST(cuda_calls_leave_the_current_device_alone) {
  int before = 0, after = 0;
  CHECK_EQ(cudaGetDevice(&before), cudaSuccess);
  OnDevice on(4096);
  on.finish();
  CHECK_EQ(cudaGetDevice(&after), cudaSuccess);
  CHECK_EQ(before, after);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(cuda_knows_a_stream_that_is_captured) {
  OnDevice on(4096);
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  CHECK(!on.device->is_capturing(stream));
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  CHECK(on.device->is_capturing(stream));
  on.finish();  // which the capture does not forbid, since it concerns another stream
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/// Seconds that `work` takes on the device; the best of several times.
template <class Work>
double seconds_of(OnDevice& on, const Work& work) {
  double best = 1e9;
  for (int i = 0; i < 20; ++i) {
    on.finish();
    const auto began = Clock::now();
    for (int k = 0; k < 10; ++k) work();
    on.finish();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - began).count() / 10);
  }
  return best;
}

TEST(cuda_kernels_are_about_as_fast_as_a_copy) {
  constexpr size_t kBytes = size_t{256} << 20;
  OnDevice on(kBytes, 3);
  const double copy = 2 * kBytes / seconds_of(on, [&] { on.device->copy(on.at(1), on.at(0), kBytes, on.stream()); });
  const double sum = 3 * kBytes / seconds_of(on, [&] {
                       on.device->reduce({on.at(2)}, {on.at(0), on.at(1)}, kBytes / 4, DType::Float32, {}, on.stream());
                     });
  const double halves =
      3 * kBytes / seconds_of(on, [&] {
        on.device->reduce({on.at(2)}, {on.at(0), on.at(1)}, kBytes / 2, DType::BFloat16, {}, on.stream());
      });
  std::printf("GB/s: copy %.0f, sum of float32 %.0f, of bfloat16 %.0f\n", copy / 1e9, sum / 1e9, halves / 1e9);
  // A loose bound, since others may use the device meanwhile.
  for (const double rate : {sum, halves}) CHECK(rate > 0.4 * copy);
}

}  // namespace
}  // namespace ours
