#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "common/dtype.h"
#include "kernels/reduce.h"
#include "transport/tcp/tcp_call.h"

namespace ours {

/// The ranks of a list, of which this one is members[place], reduce small arrays in log2(P) exchanges (Thakur,
/// Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH"): in step k, members
/// whose numbers differ in bit k exchange what they have and both reduce it. If P is no power of two, the first
/// members are paired beforehand: the even one of a pair gives its input to the odd one, and gets the result in the
/// end.
///
/// Both sides of an exchange put the lower one's value first, so they compute the same bits, and hence all members
/// do. The order is that of a tree: (x0 + x1) + (x2 + x3). Partial sums travel in the type of the call: a half type
/// is rounded log2(P) times, once more if P is no power of two.
class Doubling {
 public:
  Doubling(TcpCall& tcp, const std::vector<int>& members, int place) : tcp_(tcp), members_(members), place_(place) {}

  /// Waits until the function it is given returns true.
  using Wait = std::function<void(const std::function<bool()>&)>;

  /// `mine` is this member's array, and in the end the result; `theirs` is a buffer of the same size. Returns when
  /// the system has taken everything that is sent.
  void reduce(std::byte* mine, std::byte* theirs, size_t count, DType dtype, const Reduction& reduction,
              const Wait& wait);

 private:
  int size() const { return static_cast<int>(members_.size()); }
  int rank_of(int place) const { return members_[static_cast<size_t>(place)]; }

  TcpCall& tcp_;
  const std::vector<int>& members_;
  const int place_;
};

}  // namespace ours
