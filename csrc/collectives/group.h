#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/call.h"
#include "collectives/call_record.h"
#include "collectives/exchange_plan.h"
#include "collectives/pieces.h"
#include "collectives/spans.h"
#include "kernels/reduce.h"

namespace ours {

/// A reduction over all ranks' `in`. The result goes to the same array (`out == &in`) or to another of as many
/// elements; `out` is null on a rank that does not want it.
struct Reducing {
  const Pieces& in;
  const Pieces* out;
  const Reduction& reduction;
  int root = -1;  ///< the only rank that wants the result; -1: all do
};

/// A reduction whose result is divided among the ranks: inputs[r], of counts[r] elements, is reduced over all ranks
/// into rank r's `out`.
struct Scattering {
  const std::vector<const void*>& inputs;
  const std::vector<size_t>& counts;
  void* out;
  const Reduction& reduction;
};

/// An operation of this rank while it is under way.
struct Running {
  const Call& call;
  const CallRecord record;         ///< what must agree on all ranks
  const uint64_t fingerprint = 0;  ///< and of sizes that do not fit into it; 0: none
};

/// The memory of a group on this rank's node, in bytes.
struct MemoryUse {
  size_t segment = 0;  ///< of the segment through which its ranks exchange data; they share it
  size_t tensors = 0;  ///< that this rank has given to tensors (Group::allocate())
};

/// A fixed set of ranks that communicate collectively. All operations block until this rank's part is done and its
/// buffers may be reused. They must be called by one thread at a time and in the same order on all ranks.
///
/// Errors before any byte of a result is written: InvalidArgument (this call has no meaning, found locally),
/// MismatchError (ranks called different things, or one refused its call; thrown on every rank). Later: TimeoutError,
/// PeerError, AbortedError. After any error but InvalidArgument every later call throws the same error again.
///
/// In-place use (in == out, or an input span equal to its own rank's output span) is allowed everywhere.
///
/// An operation returns whether it has ended, which is false if the call is for its beginning alone. If it has one,
/// has_begun() is true then, and the next operation must be the same, with a call for the whole.
///
/// This class does what every operation has in common: it checks the arguments, records what was called for the
/// comparison with the peers, and turns what is thrown into the group's failure. A kind of group implements the do_
/// functions.
class Group {
 public:
  virtual ~Group() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // The operations, in the form in which kinds of groups get them.
  bool barrier(const Call& call);
  bool reduce(const Call& call, const Reducing& job);
  /// `counts` must agree on all ranks.
  bool reduce_scatter(const Call& call, const Scattering& job);
  bool exchange(const Call& call, const ExchangePlan& plan);

  /// Whether operations may have a beginning that waits for nobody. Otherwise no call may be for one.
  virtual bool can_begin() const { return false; }
  virtual bool has_begun() const { return false; }
  /// Then: whether all ranks have begun that operation, so that the rest of it waits for nobody.
  virtual bool have_all_begun() const { return true; }

  // The same operations in their usual form.
  /// out[i] = reduction over all ranks' in[i]; `count` elements of call.dtype.
  bool all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction);
  /// Like all_reduce, in place, of an array that lies in several places: `pieces` one after the other. It may be cut
  /// differently on each rank, unless NCCL does it; the total number of elements must agree. Empty pieces are allowed.
  bool all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction);
  /// Like all_reduce, but only root's `out` is written (elsewhere it is ignored).
  bool reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction, int root);
  bool reduce_scatter(const Call& call, const std::vector<const void*>& inputs, const std::vector<size_t>& counts,
                      void* out, const Reduction& reduction) {
    return reduce_scatter(call, Scattering{inputs, counts, out, reduction});
  }
  bool broadcast(const Call& call, Span buffer, int root) {
    return exchange(call, planner(call).broadcast(buffer, root));
  }
  /// outputs[r] receives rank r's input. Inputs may differ in size, but all ranks must agree on each size.
  bool all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
    return exchange(call, planner(call).all_gather(input, outputs));
  }
  /// `outputs` has size() spans on root and is ignored elsewhere.
  bool gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) {
    return exchange(call, planner(call).gather(input, outputs, root));
  }
  /// `inputs` has size() spans on root and is ignored elsewhere.
  bool scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) {
    return exchange(call, planner(call).scatter(inputs, output, root));
  }
  /// inputs[d] goes to rank d; outputs[s] comes from rank s.
  bool all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) {
    return exchange(call, planner(call).all_to_all(inputs, outputs));
  }

  /// Waits until every rank has arrived; on timeout throws TimeoutError that names the first absent rank, or all of
  /// them. Independent of the other collectives: a rank that hangs in one of them is found missing here. May run
  /// on another thread than they do.
  virtual void monitored_barrier(const Call& call, bool wait_all_ranks) = 0;

  /// Allocates `bytes` bytes, aligned to a page and zeroed. An all_reduce in place needs no copies if all ranks call
  /// it with such memory. Null if the group has none or has failed, and in forked children. Outlives the group.
  /// Throws SystemError if there is not enough. Callable from any thread.
  virtual std::shared_ptr<void> allocate(size_t /*bytes*/) { return nullptr; }

  /// Whether allocate() is worth calling; false if no memory saves a copy.
  virtual bool allocates() const { return false; }

  /// Frees every waiter of this rank within 100 ms and tells the peers. Callable from any thread, more than once.
  virtual void abort(const std::string& reason) = 0;

  /// Makes `error`, unless it is InvalidArgument, the failure of the group. For errors between the operations of a
  /// compound one, when peers would wait for this rank. Callable from any thread, more than once.
  virtual void fail(const std::exception_ptr& error) noexcept = 0;

  /// Notes that this rank does not make the call, because its arguments have no meaning here, for the reason `why`.
  /// Never waits. A peer that makes the call of that number finds the note, and the group fails with it. If all ranks
  /// refuse the call, the group stays as it is. Must be called in the order of the calls.
  virtual void refuse(const Call& call, const std::string& why) noexcept = 0;

  /// Leaves the group in an orderly way: peers that still wait for this rank are told so. Never blocks.
  virtual void leave() noexcept = 0;

  virtual MemoryUse memory_use() const { return {}; }

  /// How many of the ranks each node has.
  virtual std::vector<int> node_sizes() const { return {size()}; }

  /// The message of the failure that ended this group, or empty.
  virtual std::string failure() const = 0;

 protected:
  /// Throws the failure of the group, if there is one; called before each operation.
  virtual void check_usable(const Call& call) = 0;

  /// Throws InvalidArgument, the same on all ranks, if this kind of group cannot do the reduction.
  virtual void check_possible(DType /*dtype*/, const Reduction& /*reduction*/) const {}

  // The part of each operation that a kind of group implements. The arguments of this rank have been checked; those of
  // peers have not. What has no beginning does nothing if the call is for that.
  virtual void do_barrier(const Running& run) = 0;
  virtual void do_reduce(const Running& run, const Reducing& job) = 0;
  virtual void do_reduce_scatter(const Running& run, const Scattering& job) = 0;
  virtual void do_exchange(const Running& run, const ExchangePlan& plan) = 0;

  /// Calls body(), which is one of the above. Whatever it throws becomes the failure of the group. A kind of group that
  /// does more around all of its operations overrides this.
  virtual void guarded(const Running& run, const std::function<void()>& body);

 private:
  template <class Body>
  bool operate(const Running& run, Body&& body);
  Planner planner(const Call& call) const { return {call.op, rank(), size()}; }
};

}  // namespace ours
