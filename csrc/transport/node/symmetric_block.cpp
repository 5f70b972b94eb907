#include "transport/node/symmetric_block.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "common/error.h"
#include "common/random.h"

namespace ours {

namespace {

// The file begins with a page that has the nonce.
constexpr size_t kPage = 4096;

size_t file_bytes(size_t bytes) {
  constexpr size_t kMost = size_t{1} << 62;
  if (bytes > kMost) {
    throw InvalidArgument(std::to_string(bytes) + " bytes of symmetric memory are more than a process can address");
  }
  return kPage + (std::max(bytes, size_t{1}) + kPage - 1) / kPage * kPage;
}

uint64_t& nonce_in(const SharedMemory& memory) { return *reinterpret_cast<uint64_t*>(memory.data()); }

}  // namespace

std::shared_ptr<SymmetricBlock> SymmetricBlock::make(size_t bytes) {
  const size_t total = file_bytes(bytes);
  auto memory = SharedMemory::create(total);
  // Now, so that a later access cannot die of SIGBUS.
  memory->reserve(0, total);
  const Place place{bytes, draw_random<uint64_t>(), ::getpid(), memory->fd()};
  nonce_in(*memory) = place.nonce;
  return std::shared_ptr<SymmetricBlock>(new SymmetricBlock(std::move(memory), place));
}

std::shared_ptr<SymmetricBlock> SymmetricBlock::open(const Place& place) {
  auto memory = SharedMemory::open(descriptor_path(place.pid, place.fd));
  if (memory->bytes() != file_bytes(place.bytes) || nonce_in(*memory) != place.nonce) {
    throw Error("process " + std::to_string(place.pid) +
                " has other memory in the place of its symmetric memory; was "
                "the tensor freed before all ranks had called rendezvous()?");
  }
  return std::shared_ptr<SymmetricBlock>(new SymmetricBlock(std::move(memory), place));
}

SymmetricBlock::SymmetricBlock(std::shared_ptr<SharedMemory> memory, const Place& place)
    : memory_(std::move(memory)), place_(place) {
  ForkGuard::add(*this);
}

SymmetricBlock::~SymmetricBlock() { ForkGuard::remove(*this); }

std::byte* SymmetricBlock::data() const { return memory_->data() + kPage; }

void SymmetricBlock::keep_to_oneself() noexcept {
  // The child goes on sharing what cannot be mapped.
  map_privately(memory_->data(), memory_->bytes(), memory_->fd(), 0);
}

}  // namespace ours
