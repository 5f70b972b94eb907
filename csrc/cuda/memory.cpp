#include "cuda/memory.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/partition.h"

namespace ours::cuda {

std::shared_ptr<void> Blocks::take(size_t bytes) {
  const size_t whole = std::max<size_t>(1, piece_count(bytes, unit_)) * unit_;
  void* memory = take_kept(whole);
  if (memory == nullptr) memory = take_new(whole);
  return {memory, [self = shared_from_this()](void* block) { self->keep(block); }};
}

size_t Blocks::bytes_at(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = used_.find(memory);
  return found == used_.end() ? 0 : found->second;
}

/// The smallest that is large enough, unless that wastes a quarter.
void* Blocks::take_kept(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kept_.lower_bound(bytes);
  if (found == kept_.end() || found->first - bytes > bytes / 4) return nullptr;
  void* memory = found->second;
  used_[memory] = found->first;
  kept_.erase(found);
  return memory;
}

void* Blocks::take_new(size_t bytes) {
  void* memory = allocate(bytes);
  if (memory == nullptr) {
    // Better to wait for the device than to fail.
    std::multimap<size_t, void*> kept;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      kept.swap(kept_);
    }
    for (const auto& block : kept) give_back(block.second);
    memory = allocate(bytes);
  }
  if (memory == nullptr) check(cudaErrorMemoryAllocation, ("allocating " + std::to_string(bytes) + " bytes").c_str());
  const std::lock_guard<std::mutex> lock(mutex_);
  used_[memory] = bytes;
  return memory;
}

void Blocks::keep(void* memory) noexcept {
  if (is_forked_child()) return;  // whose lock may be held by a thread that it does not have
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = used_.find(memory);
  kept_.emplace(found->second, memory);
  used_.erase(found);
}

void* PinnedBlocks::allocate(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  check(error, "cudaHostAlloc");
  return memory;
}

void PinnedBlocks::give_back(void* memory) noexcept { static_cast<void>(cudaFreeHost(memory)); }

void* DeviceBlocks::allocate(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    return nullptr;
  }
  check(error, "cudaMalloc");
  return memory;
}

void DeviceBlocks::give_back(void* memory) noexcept { static_cast<void>(cudaFree(memory)); }

namespace {

const ProcessToken& own_token() {
  static const ProcessToken kToken = [] {
    std::random_device random;
    ProcessToken token{};
    for (unsigned char& byte : token) byte = static_cast<unsigned char>(random());
    return token;
  }();
  return kToken;
}

}  // namespace

MemoryHandle share_block(const void* memory, size_t bytes) {
  SharedBlock block{};
  check(cudaIpcGetMemHandle(&block.ipc, const_cast<void*>(memory)), "cudaIpcGetMemHandle");
  block.process = own_token();
  block.address = memory;
  block.bytes = bytes;
  MemoryHandle handle{};
  std::memcpy(handle.data(), &block, sizeof(block));
  return handle;
}

std::shared_ptr<void> map_block(const MemoryHandle& handle, CUcontext context) {
  SharedBlock block{};
  std::memcpy(&block, handle.data(), sizeof(block));
  // CUDA refuses to map what is of the same process.
  if (block.process == own_token()) return {const_cast<void*>(block.address), [](void*) {}};
  void* mapped = nullptr;
  check(cudaIpcOpenMemHandle(&mapped, block.ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return {mapped, [context](void* address) { end_quietly(context, [&] { return cudaIpcCloseMemHandle(address); }); }};
}

}  // namespace ours::cuda
