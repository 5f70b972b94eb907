#include "cuda/gates.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>

#include "common/error.h"

namespace ours::cuda {

class Gate : public StreamGate {
 public:
  explicit Gate(std::shared_ptr<GateWords> words) : words_(std::move(words)), word_(words_->take()) {}
  ~Gate() override { open(); }

  void hold(StreamHandle stream) override {
    // Should it be opened at this moment, the stream finds the word grown.
    if (!is_open()) words_->hold(word_, stream);
  }
  void open() noexcept override {
    if (!open_.exchange(true)) words_->open(word_);
  }
  bool is_open() const override { return open_; }

 private:
  std::shared_ptr<GateWords> words_;
  GateWords::Word word_;
  std::atomic<bool> open_{false};
};

GateWords::GateWords(CUcontext context) : context_(context) {
  constexpr size_t kBytes = kWords * sizeof(uint32_t);
  void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw SystemError("cannot get memory for gates (mmap)", errno);
  // A child must not have a copy of it that is written first: the pinned pages would be the child's.
  ::madvise(memory, kBytes, MADV_DONTFORK);
  check(cudaHostRegister(memory, kBytes, cudaHostRegisterMapped | cudaHostRegisterPortable), "cudaHostRegister");
  host_ = static_cast<uint32_t*>(memory);
  void* seen_from_device = nullptr;
  check(cudaHostGetDevicePointer(&seen_from_device, memory, 0), "cudaHostGetDevicePointer");
  device_ = reinterpret_cast<CUdeviceptr>(seen_from_device);
  can_hold_ = try_to_hold();
  free_.reserve(kWords);
  for (size_t i = kWords; i > 0; --i) free_.push_back({static_cast<uint32_t>(i - 1), 0});
}

std::unique_ptr<StreamGate> GateWords::make_gate() { return std::make_unique<Gate>(shared_from_this()); }

GateWords::Word GateWords::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    throw DeviceError("more than " + std::to_string(kWords) +
                      " operations on the device are under way: wait for some before starting others");
  }
  Word word = free_.back();
  free_.pop_back();
  ++word.value;
  return word;
}

void GateWords::open(Word word) noexcept {
  if (is_forked_child()) return;  // the words are not in its memory
  // What this thread knows to be done on the device, or has written itself, comes before.
  __atomic_store_n(host_ + word.index, word.value, __ATOMIC_SEQ_CST);
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(word);
}

/// By a wait for what the first word has already. CUDA has no attribute that says it of waits for 32 bits.
bool GateWords::try_to_hold() const {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const CUresult result = driver().wait_value(stream, device_, 0, CU_STREAM_WAIT_VALUE_GEQ);
  static_cast<void>(cudaStreamDestroy(stream));
  if (result != CUDA_ERROR_NOT_SUPPORTED) check(result, "cuStreamWaitValue32");
  return result == CUDA_SUCCESS;
}

void GateWords::hold(Word word, StreamHandle stream) const {
  if (!can_hold_) {
    throw DeviceError(
        "streams of this device cannot wait for the host, as it or its driver does not support cuStreamWaitValue32: "
        "set OURS_BLOCKING_WAIT=1, with which the host waits itself");
  }
  const ContextGuard guard(context_);
  // No CU_STREAM_WAIT_VALUE_FLUSH: it is for data that network cards write into the device, and the device's own
  // copies and kernels had ended before the gate was opened.
  check(driver().wait_value(static_cast<CUstream>(stream), device_ + word.index * sizeof(uint32_t), word.value,
                            CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

}  // namespace ours::cuda
