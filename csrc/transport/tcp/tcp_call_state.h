#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "transport/stop_notice.h"
#include "transport/tcp/tcp_lateness.h"
#include "transport/tcp/tcp_wire.h"

namespace ours {

/// Records what this rank and its peers say of their calls: which call is under way here, which calls the peers are
/// in or refuse, and for which ranks they wait. Used with the mesh's lock held.
class TcpCallState {
 public:
  struct Facts {
    Signature signature;
    uint64_t number;  ///< by which ranks refuse it
    Deadline deadline;
    std::function<std::string()> what;  ///< the call in words, for messages
    /// Says how the call differs from that of a peer with another signature.
    std::function<std::string(int peer, const Signature& theirs)> mismatch;
    Arrivals* arrivals = nullptr;  ///< where to note who is late; null: nobody asks
    Clock::time_point called{};    ///< when this rank's program made the call
    StopNotice* stop = nullptr;    ///< whether a rank was asked to stop; null: nobody asks
  };
  struct Refusal {
    uint64_t number;
    std::string why;
  };

  TcpCallState(int own_rank, int size) : own_rank_(own_rank), size_(size), lateness_(own_rank, size) {}

  /// Begins a call of this rank, which lasts until end(); `facts` must live until then.
  void begin(const Facts& facts);
  void end() {
    facts_ = nullptr;
    lateness_.end();
  }
  /// The number of the last call, the same on all ranks.
  uint64_t count() const { return count_; }
  bool is_under_way() const { return facts_ != nullptr; }
  bool is_under_way(uint64_t call) const { return facts_ != nullptr && call == count_; }
  /// " during all_reduce number 3", or nothing outside calls.
  std::string during() const { return facts_ == nullptr ? "" : " during " + facts_->what(); }

  /// How a peer's signature for that call differs; empty if it does not, or if the call is not under way here.
  std::string mismatch(int peer, uint64_t call, const Signature& theirs) const;
  /// Why a peer is not in the call that is under way, from what it has said so far; empty if it may be in it.
  std::string mismatch(int peer) const;

  TcpLateness& lateness() { return lateness_; }
  /// Writes into a header of the call that is under way what this rank knows of the others.
  void stamp(FrameHeader& header) const {
    lateness_.stamp(header);
    header.stop = facts_->stop != nullptr && facts_->stop->show() ? 1 : 0;
  }
  /// Takes in what a header of data that belongs to the call that is under way says of the ranks.
  void hear_stamp(const FrameHeader& header) {
    lateness_.hear(header);
    hear_stop(header.stop != 0);
  }

  /// Takes in what a peer says in a control frame. Returns false if the peer is too far ahead.
  bool hear(int rank, const FrameHeader& header, const std::string& payload);

  /// Whether a peer has agreed to be in the call and to have come to that round. If so, the agreement is used up;
  /// otherwise the peer is awaited.
  bool take_agreement(int rank, uint32_t round);
  bool awaits(int rank) const { return peer(rank).awaited; }

  /// Whether data is awaited for which no receive is posted.
  bool expects(int rank) const { return peer(rank).expected; }
  void set_expected(int rank, bool expected) { peers_[rank].expected = expected; }

  /// Notes that this rank does not make the call of that number.
  void refuse(uint64_t number, std::string why) { remember(own_rank_, {number, std::move(why)}); }
  /// The last refusals of this rank.
  const std::vector<Refusal>& own_refusals() const { return peer(own_rank_).refusals; }
  /// The reason why a rank, possibly this one, does not make the call of that number; empty if it did not refuse it.
  std::string refusal(int rank, uint64_t number) const;

  /// Whether a peer has reached (rank 0: judged) the monitored barrier of that number.
  bool reached_monitor(int rank, uint64_t number) const { return peer(rank).monitor >= number; }

  /// Sets the ranks for which this rank waits by other means than the mesh.
  void set_absent(std::vector<uint32_t> ranks) { absent_ = std::move(ranks); }
  /// The ranks for which this rank waits in the end, when it waits directly for those in `waited`.
  std::vector<uint32_t> causes(const std::vector<uint32_t>& waited) const;
  /// Returns true if this differs from what this rank declared last in this call.
  bool declare(const std::vector<uint32_t>& causes);

 private:
  struct Agreement {
    uint64_t call;
    uint32_t round;
    Signature signature;
    bool stop;
  };
  struct Peer {
    std::vector<Agreement> agreements;  ///< not asked for yet
    std::vector<Refusal> refusals;      ///< the last ones
    bool awaited = false;
    bool expected = false;
    uint64_t monitor = 0;
    uint64_t waiting_call = 0;     ///< the last call in which it said that it waits,
    std::vector<uint32_t> causes;  ///< and for which ranks
  };

  const Peer& peer(int rank) const;
  void remember(int rank, Refusal refusal);
  void hear_stop(bool known) {
    if (facts_ != nullptr && facts_->stop != nullptr) facts_->stop->hear(known);
  }

  const int own_rank_;
  const int size_;
  uint64_t count_ = 0;
  const Facts* facts_ = nullptr;  ///< the call that is under way
  std::map<int, Peer> peers_;     ///< those that said something or are waited for; this rank with its own refusals
  TcpLateness lateness_;
  std::vector<uint32_t> declared_;
  std::vector<uint32_t> absent_;
};

}  // namespace ours
