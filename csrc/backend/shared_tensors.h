#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <memory>

namespace ours {

/// From now on, CPU tensors of at least that many bytes that this thread makes get their memory from `heap`, and all
/// others as before. May be nested: the last call holds. Throws Error if torch does not take another allocator.
void begin_sharing_tensors(std::shared_ptr<c10::Allocator> heap, size_t least);

/// Ends what this thread has begun last. Throws Error if there is nothing. Tensors keep their memory.
void end_sharing_tensors();

}  // namespace ours
