#include "cuda/streams.h"

namespace ours::cuda {

CudaStream::CudaStream(CUcontext context, int priority) : context_(context) {
  // The stream and the default stream do not wait for each other.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority), "cudaStreamCreateWithPriority");
}

CudaStream::~CudaStream() {
  end_quietly(context_, [&] { return cudaStreamDestroy(stream_); });
}

CudaEvent::CudaEvent(CUcontext context) : context_(context) {
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

CudaEvent::~CudaEvent() {
  end_quietly(context_, [&] { return cudaEventDestroy(event_); });
}

void CudaEvent::record(StreamHandle stream) {
  const ContextGuard guard(context_);
  check(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
}

bool CudaEvent::reached() {
  const ContextGuard guard(context_);
  const cudaError_t state = cudaEventQuery(event_);
  if (state == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // it is no error, but would be taken for one
    return false;
  }
  check(state, "cudaEventQuery");
  return true;
}

void CudaEvent::block(StreamHandle stream) {
  const ContextGuard guard(context_);
  check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0), "cudaStreamWaitEvent");
}

}  // namespace ours::cuda
