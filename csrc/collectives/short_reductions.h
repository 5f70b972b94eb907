#pragma once

#include <cstddef>

#include "collectives/members.h"
#include "common/dtype.h"
#include "kernels/reduce.h"

// Ways in which some ranks reduce a short array, so that all of them have the result.

namespace ours {

struct ShortArray {
  size_t count;
  DType dtype;
  Reduction reduction;

  size_t bytes() const { return count * size_of(dtype); }
};

/// Each sends its whole array to all others, and reduces all arrays for itself: one message's time, and more arithmetic
/// than needed. `all` has one array for each member, this one's in its place. The result goes to `result` unless it is
/// null.
void reduce_whole(const Members& members, const ShortArray& array, std::byte* all, void* result);

/// Takes log2(P) exchanges (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
/// in MPICH"): in step k, members whose numbers differ in bit k exchange what they have and both reduce it. If P is no
/// power of two, the first members are paired beforehand: the even one of a pair gives its input to the odd one, and
/// gets the result in the end.
///
/// Both sides of an exchange put the lower one's value first, so all members compute the same bits, in the order of a
/// tree: (x0 + x1) + (x2 + x3). Partial sums travel in the type of the call: a half type is rounded log2(P) times, once
/// more if P is no power of two.
///
/// `mine` is this member's array, and in the end the result; `theirs` is a buffer of the same size.
void reduce_by_doubling(const Members& members, const ShortArray& array, std::byte* mine, std::byte* theirs);

}  // namespace ours
