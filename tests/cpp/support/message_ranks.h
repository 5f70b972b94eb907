#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/messages/point_to_point.h"
#include "support/node_ranks.h"

// Helpers for the tests of point-to-point messages.

namespace ours::testing {

/// Long enough for a slow machine, and short enough to end a test that hangs.
TransferLimitPtr soon();

/// A rank's end of the messages of a group, for tensors of ints.
struct Port {
  explicit Port(const std::shared_ptr<NodeSession>& session);
  explicit Port(std::shared_ptr<PointToPoint> messages) : p2p(std::move(messages)) {}
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  ~Port();

  std::shared_ptr<Transfer> send(const std::vector<int>& data, int to, int tag = 0);
  /// `then` is the callback of the transfer.
  std::shared_ptr<Transfer> recv(std::vector<int>& data, int from, int tag = 0, std::function<void()> then = nullptr);
  /// Throws the error of the transfer.
  void wait(const std::shared_ptr<Transfer>& transfer);

  std::shared_ptr<PointToPoint> p2p;  ///< a callback may drop it
};

/// One rank's part of a test.
struct Rank {
  int rank;
  std::shared_ptr<PointToPoint> p2p;
  std::function<void()> leave;
};
using Body = std::function<void(const Rank&)>;

/// The carrier of the messages; with Nodes, neighbours share one by twos. The rings in shared memory hold 4 KiB; what
/// is longer ranks of the same node read in the sender's memory, except with Segment.
enum class Carrier { Node, Segment, Tcp, Nodes };
constexpr Carrier kCarriers[] = {Carrier::Node, Carrier::Segment, Carrier::Tcp, Carrier::Nodes};

/// Runs `body` on every rank.
void run_ranks(Carrier carrier, int n, const Body& body);
/// The same with each carrier in turn.
void run_ranks(int n, const Body& body);

std::vector<int> numbers(int seed, size_t count);

}  // namespace ours::testing
