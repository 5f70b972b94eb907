#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ours {

using SipKey = std::array<uint8_t, 16>;

/// SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed checksum of a short message, which cannot be computed or guessed
/// without the key.
uint64_t siphash(const SipKey& key, const void* data, size_t bytes);

}  // namespace ours
