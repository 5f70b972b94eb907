#include "transport/node/channel.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

std::byte pattern(size_t i) { return static_cast<std::byte>((i * 2654435761u) >> 13 & 255); }

TEST(channel_carries_a_stream_across_its_end_without_waiting) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    if (session->rank() != 0) return;
    Channel out(*session, 0, 1), in(*session, 0, 1);
    const size_t capacity = out.writable();
    CHECK_EQ(capacity, session->layout().ring_bytes);
    CHECK_EQ(in.readable(), 0u);
    size_t written = 0, read = 0;
    bool around = false;
    // Steps that do not divide the capacity, so that pieces cross the ring's end at many places.
    for (size_t step : {1, 7, 1000, 4095, 4096, 4097, 3, 2500, 2500, 4096, 4095}) {
      std::vector<std::byte> data(step), back(step + 1);
      for (size_t i = 0; i < step; ++i) data[i] = pattern(written + i);
      const size_t taken = out.write(data.data(), step, std::exchange(around, !around));
      CHECK_EQ(taken, std::min(step, capacity));
      written += taken;
      CHECK_EQ(in.readable(), taken);
      in.peek(back.data(), 1);
      CHECK(back[0] == pattern(read));
      CHECK_EQ(in.read(back.data(), back.size()), taken);
      for (size_t i = 0; i < taken; ++i) CHECK(back[i] == pattern(read + i));
      read += taken;
    }
    CHECK_EQ(out.write("abcdef", 6), 6u);
    in.skip(4);
    char rest[8] = {};
    CHECK_EQ(in.read(rest, sizeof(rest)), 2u);
    CHECK_EQ(std::string(rest), "ef");
  });
}

TEST(channel_is_safe_between_one_writer_and_one_reader) {
  constexpr size_t kTotal = 300000;
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    Channel channel(*session, 0, 1);
    std::vector<std::byte> piece(997);
    size_t moved = 0;
    bool around = false;  // in turns: both ways publish the same bytes in the same order
    while (moved < kTotal) {
      const size_t most = std::min(piece.size(), kTotal - moved);
      if (session->rank() == 0) {
        for (size_t i = 0; i < most; ++i) piece[i] = pattern(moved + i);
        moved += channel.write(piece.data(), most, std::exchange(around, !around));
      } else {
        const size_t n = channel.read(piece.data(), most);
        for (size_t i = 0; i < n; ++i) CHECK(piece[i] == pattern(moved + i));
        moved += n;
      }
      std::this_thread::yield();
    }
  });
}

}  // namespace
}  // namespace ours::testing
