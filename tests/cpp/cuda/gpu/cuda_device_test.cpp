#include <cuda_runtime_api.h>

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

}  // namespace
}  // namespace ours
