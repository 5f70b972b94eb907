#include "transport/node/symmetric_block.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>

#include "common/error.h"
#include "support/children.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

constexpr size_t kPage = 4096;

size_t descriptors() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) count += entry.path().empty() ? 0 : 1;
  return count;
}

TEST(symmetric_block_is_zeroed_and_seen_where_it_is_mapped_twice) {
  for (const size_t bytes : {size_t{0}, size_t{1}, kPage, 3 * kPage + 1}) {
    const auto own = SymmetricBlock::make(bytes);
    CHECK_EQ(reinterpret_cast<uintptr_t>(own->data()) % kPage, uintptr_t{0});
    for (size_t i = 0; i < bytes; ++i) CHECK(own->data()[i] == std::byte{0});
    const auto peer = SymmetricBlock::open(own->place());
    CHECK_EQ(peer->bytes(), bytes);
    CHECK(peer->data() != own->data());
    if (bytes == 0) continue;
    own->data()[bytes - 1] = std::byte{7};
    CHECK(peer->data()[bytes - 1] == std::byte{7});
  }
}

TEST(symmetric_block_outlives_its_maker_and_leaves_no_descriptor) {
  const size_t before = descriptors();
  {
    auto own = SymmetricBlock::make(kPage);
    const auto peer = SymmetricBlock::open(own->place());
    own->data()[0] = std::byte{5};
    own.reset();
    CHECK(peer->data()[0] == std::byte{5});
  }
  CHECK_EQ(descriptors(), before);
}

TEST(symmetric_block_that_is_gone_or_another_is_not_mapped) {
  SymmetricBlock::Place place{};
  {
    const auto gone = SymmetricBlock::make(kPage);
    place = gone->place();
  }
  CHECK_THROWS(Error, SymmetricBlock::open(place));
  // Another block has taken the number of the descriptor.
  const auto other = SymmetricBlock::make(kPage);
  place.fd = other->place().fd;
  CHECK_CONTAINS(CHECK_THROWS(Error, SymmetricBlock::open(place)), "other memory in the place");
  place.nonce = other->place().nonce;
  place.bytes = 2 * kPage;
  CHECK_THROWS(Error, SymmetricBlock::open(place));
}

TEST(symmetric_block_of_absurd_size_is_refused) {
  CHECK_THROWS(InvalidArgument, SymmetricBlock::make(~size_t{0}));
  const size_t before = descriptors();
  CHECK_THROWS(SystemError, SymmetricBlock::make(size_t{1} << 61));
  CHECK_EQ(descriptors(), before);
}

TEST(symmetric_block_is_the_childs_own_after_a_fork) {
  const auto own = SymmetricBlock::make(kPage);
  const auto peer = SymmetricBlock::open(own->place());
  own->data()[0] = std::byte{1};
  CHECK(own->is_here());
  CHECK(in_child([&] {
    const bool seen = own->data()[0] == std::byte{1} && peer->data()[0] == std::byte{1} && !own->is_here();
    own->data()[0] = std::byte{2};
    peer->data()[1] = std::byte{2};
    return seen;
  }));
  CHECK(own->data()[0] == std::byte{1});
  CHECK(own->data()[1] == std::byte{0});
}

}  // namespace
}  // namespace ours::testing
