#pragma once

namespace ours {

/// Notes that somebody has asked this process to stop. For signal handlers: it neither locks nor allocates.
void request_stop() noexcept;

/// Whether somebody has.
bool stop_requested() noexcept;

/// Forgets it, for a forked child, whose parent was asked.
void forget_stop_request() noexcept;

}  // namespace ours
