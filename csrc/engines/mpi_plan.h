#pragma once

#include <string>
#include <vector>

#include "engines/mpi_meeting.h"

// How the ranks of a group find out whether they are one MPI job: each leaves a word, rank 0 makes a plan of all, which
// all get. No MPI here.

namespace ours::mpi {

/// What a rank says of itself.
struct Word {
  enum class State {
    Failed,    ///< it cannot take part; `text` says why
    Running,   ///< MPI was initialised before
    Launched,  ///< MPI is not initialised, but somebody started the process for it
    Alone,     ///< nobody did
  };

  State state = State::Failed;
  int rank = -1;        ///< in the MPI job
  std::string job;      ///< see MpiLauncher
  std::string library;  ///< which MPI: "Open MPI v5.0.11"
  std::string text;

  static Word failure(std::string text);
  std::string write() const;
  static Word read(const std::string& written);
};

struct Plan {
  unsigned nonce = 0;      ///< random, the same for all ranks
  std::vector<int> ranks;  ///< in the MPI job, by rank of the group

  std::string write() const;
  static Plan read(const std::string& written);
};

/// What these words amount to. Throws Error that says why they do not go together, and what to do.
Plan make_plan(const std::vector<Word>& words, unsigned nonce);

/// Exchanges words; the same plan, or the same Error, on all ranks.
Plan agree(const MpiMeeting& meeting, const Word& word);

}  // namespace ours::mpi
