#include "collectives/messages/inbox.h"

#include <fstream>

#include "common/error.h"
#include "support/testing.h"

// What a header promises costs no memory.

namespace ours::testing {
namespace {

std::shared_ptr<Message> receive(int tag) {
  return std::make_shared<Message>(Op::Recv, nullptr, 0, DType::UInt8, 1, tag, nullptr, nullptr);
}

/// The memory of this process, in MiB.
size_t resident() {
  std::ifstream file("/proc/self/statm");
  size_t total = 0, pages = 0;
  file >> total >> pages;
  return pages * 4 >> 10;
}

TEST(a_message_that_is_set_aside_takes_memory_only_as_its_bytes_come) {
  Inbox inbox(0, 2, [](int rank) { return "rank " + std::to_string(rank); });
  inbox.add(receive(1));
  const size_t before = resident();
  CHECK(inbox.begin(1, {size_t{1} << 30, 0, static_cast<uint32_t>(DType::UInt8)}));
  CHECK(inbox.place(1) != nullptr);
  CHECK(resident() < before + 512);
}

TEST(a_message_for_which_there_is_no_memory_is_an_error) {
  Inbox inbox(0, 2, [](int rank) { return "rank " + std::to_string(rank); });
  inbox.add(receive(1));
  for (const uint64_t bytes : {uint64_t{1} << 62, UINT64_MAX}) {
    const std::string text = CHECK_THROWS(Error, inbox.begin(1, {bytes, 0, static_cast<uint32_t>(DType::UInt8)}));
    CHECK_CONTAINS(text, "rank 0 has no memory for a message of " + std::to_string(bytes) + " bytes that rank 1 sent");
  }
}

}  // namespace
}  // namespace ours::testing
