#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "collectives/call_record.h"
#include "collectives/op.h"
#include "collectives/spans.h"

namespace ours {

/// The collectives that move data unchanged.
enum class Movement : uint8_t { Broadcast, AllGather, Gather, Scatter, AllToAll };

/// What one rank sends to each rank of its group, itself included, and receives from each in one of these
/// collectives. All of them are one exchange, which a kind of group implements only once; it may treat some
/// movements specially. Pure data: the memory is the caller's. Planner makes it.
struct ExchangePlan {
  Movement movement;
  int root = -1;  ///< -1 for AllGather and AllToAll, which have none
  /// One entry for each rank. An empty message differs from none: its receiver expects it, and compares its size.
  std::vector<std::optional<ConstSpan>> sends;
  std::vector<std::optional<Span>> receives;

  /// Whether a rank sends the same bytes to all other ranks that it sends anything to.
  bool is_common() const;

  /// In bytes; 0 where there is no message.
  size_t sent(size_t to) const { return sends[to].value_or(ConstSpan{}).bytes; }
  size_t received(size_t from) const { return receives[from].value_or(Span{}).bytes; }

  /// The buffer of a broadcast, on every rank.
  Span buffer() const { return receives[static_cast<size_t>(root)].value_or(Span{}); }

  /// Writes sent() of each rank and then received() of each into `table`, which has room for 2 * ranks numbers.
  void write_sizes(uint64_t* table) const;

  /// A number for all that rank `self`, to which this plan belongs, sends to others, less one for all that it expects
  /// from them. If what is sent and what is expected agree, these numbers of all ranks add up to 0, and otherwise, with
  /// 64 bits of a hash for each message, to something else.
  uint64_t balance(size_t self) const;

  /// The bytes of the longest message between rank `self`, to which this plan belongs, and another.
  size_t longest(size_t self) const;

  /// Whether what comes from `peer` overwrites what is sent to it, so that a copy must be sent.
  bool overlaps(size_t peer) const;

  /// Whether rank `self`, to which this plan belongs, may overwrite what it sends before others, and at last it itself,
  /// have read it.
  bool overwrites_sends(size_t self) const;

  /// Whether all ranks send and receive a message of `bytes`, which allows some kinds of groups a shorter way.
  bool is_uniform(size_t bytes) const;

  /// Copies what rank `self`, to which this plan belongs, sends to itself. For host memory.
  void copy_own(size_t self) const;
};

/// Throws InvalidArgument unless 0 <= root < size.
void check_root(int root, int size);

/// Makes the plans of one rank. All functions throw InvalidArgument if the arguments have no meaning: a root outside
/// the group, a list without one buffer for each rank, or a rank whose message to itself does not have the size it
/// expects.
struct Planner {
  Op op;  ///< for messages
  int rank;
  int size;

  ExchangePlan broadcast(Span buffer, int root) const;
  ExchangePlan all_gather(ConstSpan input, const std::vector<Span>& outputs) const;
  /// `outputs` only counts on the root.
  ExchangePlan gather(ConstSpan input, const std::vector<Span>& outputs, int root) const;
  /// `inputs` only counts on the root.
  ExchangePlan scatter(const std::vector<ConstSpan>& inputs, Span output, int root) const;
  ExchangePlan all_to_all(const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) const;

 private:
  ExchangePlan empty(Movement movement, int root) const;
  void check_one_a_rank(size_t buffers) const;
  ExchangePlan checked(ExchangePlan plan) const;
};

/// Says how two plans disagree: "rank 1 sends 8 bytes to rank 0, which expects 4, in ...".
std::string sizes_disagree(const std::string& sender, uint64_t sent, const std::string& receiver, uint64_t expected,
                           const CallRecord& record);

/// tables[r] is what rank r's plan wrote with write_sizes(). Throws MismatchError, the same on all ranks, unless each
/// message has the size that its receiver expects. Returns the bytes of the longest message between two ranks.
size_t check_sizes(const std::vector<const uint64_t*>& tables, const std::function<std::string(int rank)>& describe,
                   const CallRecord& record);

}  // namespace ours
