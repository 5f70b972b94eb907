#pragma once

#include <memory>
#include <string>

#include "common/deadline.h"
#include "transport/engine.h"
#include "transport/key_values.h"

namespace ours {

/// Why this process cannot have an engine that sends by MPI: the library with MPI in it is missing or cannot be loaded.
/// Empty if it can be.
std::string mpi_obstacle();

/// Makes an engine that sends by MPI. All ranks of the group call it; it returns when all have. MPI lives in a library
/// of its own beside this one, which is loaded here, so nothing else needs it. `keys` are this engine's alone, `group`
/// is for messages. Throws Error, the same on all ranks: where the library is missing or cannot be loaded, where the
/// ranks are not processes of one MPI job, where MPI cannot be used by several threads; and TimeoutError.
std::shared_ptr<Engine> make_mpi_engine(int rank, int size, const std::string& group, std::shared_ptr<KeyValues> keys,
                                        Deadline deadline);

}  // namespace ours
