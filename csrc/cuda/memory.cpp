#include "cuda/memory.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>

#include "common/partition.h"

namespace ours::cuda {
namespace {

constexpr size_t kUnit = size_t{2} << 20;

/// Tells this process's memory from that of others.
using ProcessToken = std::array<unsigned char, 16>;

/// The content of a MemoryHandle.
struct SharedBlock {
  cudaIpcMemHandle_t ipc;
  ProcessToken process;
  const void* address;  ///< in the process that shared it
};
static_assert(sizeof(SharedBlock) <= sizeof(MemoryHandle), "it has to fit");

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

std::shared_ptr<void> pinned_block(size_t bytes, CUcontext context) {
  void* memory = nullptr;
  const size_t some = std::max<size_t>(bytes, 1);
  check(cudaHostAlloc(&memory, some, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(memory, 0, some);
  return {memory, [context](void* pinned) { end_quietly(context, [&] { return cudaFreeHost(pinned); }); }};
}

std::shared_ptr<void> device_block(size_t bytes, CUcontext context) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<size_t>(1, piece_count(bytes, kUnit)) * kUnit), "cudaMalloc");
  return {memory, [context](void* own) { end_quietly(context, [&] { return cudaFree(own); }); }};
}

MemoryHandle share_block(const void* memory) {
  SharedBlock block{};
  check(cudaIpcGetMemHandle(&block.ipc, const_cast<void*>(memory)), "cudaIpcGetMemHandle");
  block.process = own_token();
  block.address = memory;
  MemoryHandle handle{};
  std::memcpy(handle.data(), &block, sizeof(block));
  return handle;
}

std::shared_ptr<void> map_block(const MemoryHandle& handle, CUcontext context) {
  SharedBlock block{};
  std::memcpy(&block, handle.data(), sizeof(block));
  // CUDA refuses to map memory of the same process.
  if (block.process == own_token()) return {const_cast<void*>(block.address), [](void*) {}};
  void* mapped = nullptr;
  check(cudaIpcOpenMemHandle(&mapped, block.ipc, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return {mapped, [context](void* address) { end_quietly(context, [&] { return cudaIpcCloseMemHandle(address); }); }};
}

}  // namespace ours::cuda
