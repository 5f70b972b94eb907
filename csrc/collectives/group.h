#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/op.h"
#include "common/deadline.h"
#include "common/dtype.h"
#include "kernels/reduce.h"

namespace ours {

struct ConstSpan {
  const void* data = nullptr;
  size_t bytes = 0;
};

struct Span {
  void* data = nullptr;
  size_t bytes = 0;
};

/// What accompanies every collective call: what it is (checked against the peers' calls) and how long it may take.
struct Call {
  Op op;
  DType dtype;
  uint64_t seq;  ///< number of the collective in its process group; must agree on all ranks
  Deadline deadline;
};

/// A fixed set of ranks that communicate collectively. All methods block until this rank's part is done and its buffers
/// may be reused. Calls on one Group must be made by one thread at a time and in the same order on all ranks.
///
/// Errors, before a byte of any result is written: InvalidArgument (this call has no meaning, found locally),
/// MismatchError (ranks called different things, or one refused its call; thrown on every rank). Later: TimeoutError,
/// PeerError, AbortedError. After any error but InvalidArgument the group is failed: every later call throws the same
/// error again.
///
/// In-place use (in == out, or an input span equal to its own rank's output span) is allowed everywhere.
class Group {
 public:
  virtual ~Group() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual void barrier(const Call& call) = 0;

  /// out[i] = reduction over all ranks' in[i]; `count` elements of call.dtype.
  virtual void all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) = 0;

  /// As all_reduce, in place, of an array that lies in several places: `pieces` one after the other. Where it is cut
  /// may differ between ranks; the number of all elements must agree. Empty pieces are allowed.
  virtual void all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) = 0;

  /// As all_reduce, but only root's `out` is written (elsewhere it is ignored).
  virtual void reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
                      int root) = 0;

  /// inputs[r] (counts[r] elements) is reduced over all ranks into rank r's `out`. `counts` must agree on all ranks.
  virtual void reduce_scatter(const Call& call, const std::vector<const void*>& inputs,
                              const std::vector<size_t>& counts, void* out, const Reduction& reduction) = 0;

  virtual void broadcast(const Call& call, Span buffer, int root) = 0;

  /// outputs[r] receives rank r's input; sizes may differ between ranks, but must agree across them.
  virtual void all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) = 0;

  /// `outputs` has size() spans on root and is empty elsewhere.
  virtual void gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) = 0;

  /// `inputs` has size() spans on root and is empty elsewhere.
  virtual void scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) = 0;

  /// inputs[d] goes to rank d; outputs[s] comes from rank s.
  virtual void all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) = 0;

  /// Waits until every rank has arrived; on timeout throws TimeoutError that names the first absent rank, or all of
  /// them. Independent of the other collectives: a rank that hangs in one of them is found missing here. May be called
  /// by another thread than these.
  virtual void monitored_barrier(const Call& call, bool wait_all_ranks) = 0;

  /// Memory for `bytes` bytes, aligned to a page and zero, in which an all_reduce in place needs no copies where all
  /// ranks call it with such memory. Null where the group has none or has failed, and in forked children. Outlives the
  /// group. Throws SystemError where there is not enough. Callable from any thread.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;

  /// Whether allocate() is worth a call: false where no memory saves a copy.
  virtual bool allocates() const { return false; }

  /// Frees every waiter of this rank within 100 ms and tells the peers. Callable from any thread, more than once.
  virtual void abort(const std::string& reason) = 0;

  /// Makes `error`, unless it is InvalidArgument, the failure of the group: for what goes wrong between the operations
  /// of a compound one, where the peers would wait for this rank. Callable from any thread, more than once.
  virtual void fail(const std::exception_ptr& error) noexcept = 0;

  /// Notes that this rank does not make the call, whose arguments have no meaning here: `why`. Never waits. A peer that
  /// makes the call of that number finds the note, and the group fails with it; where all ranks refuse the call, nobody
  /// looks, and the group stays as it is. To be called in the order of the calls.
  virtual void refuse(const Call& call, const std::string& why) noexcept = 0;

  /// Leaves the group in an orderly way: peers that still wait for this rank are told so. Never blocks.
  virtual void leave() noexcept = 0;

  /// How many of the ranks each node has.
  virtual std::vector<int> node_sizes() const { return {size()}; }

  /// The message of the failure that ended this group, or empty.
  virtual std::string failure() const = 0;
};

}  // namespace ours
