#pragma once

#include <memory>
#include <string>

#include "common/deadline.h"
#include "transport/engine.h"
#include "transport/key_values.h"

namespace ours {

/// Why this process cannot have an engine that sends by MPI: the library that contains MPI is missing or cannot be
/// loaded. Empty if it can have one.
std::string mpi_obstacle();

/// Makes an engine that sends by MPI. All ranks of the group call it, and it returns when all have. It loads the
/// library that contains MPI, so that nothing else needs MPI. `keys` are for this engine alone, `group` is the group's
/// name in messages. Throws the same Error on all ranks if the library is missing or cannot be loaded, the ranks are
/// not processes of one MPI job, or MPI cannot be used by several threads; and TimeoutError.
std::shared_ptr<Engine> make_mpi_engine(int rank, int size, const std::string& group, std::shared_ptr<KeyValues> keys,
                                        Deadline deadline);

}  // namespace ours
