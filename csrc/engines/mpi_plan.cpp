#include "engines/mpi_plan.h"

#include <algorithm>
#include <random>
#include <set>
#include <sstream>

#include "common/error.h"

namespace ours::mpi {

namespace {

constexpr const char* kPlanKey = "plan";
constexpr const char* kError = "error ";
constexpr const char* kOtherwise = ", or send over TCP: OURS_INTERNODE=tcp";

std::string word_key(int rank) { return "word/" + std::to_string(rank); }

bool is_open_mpi(const std::string& library) { return library.rfind("Open MPI", 0) == 0; }

std::string describe(const Word& word) {
  if (word.state == Word::State::Alone) return "was not started by a launcher of MPI's";
  return "is rank " + std::to_string(word.rank) + " of the job '" + word.job + "'";
}

/// How to start ranks so that they are one MPI job.
std::string advice(const std::string& library) {
  const std::string mpirun = is_open_mpi(library) ? "mpirun" : "mpiexec";
  return "Start all ranks by one " + mpirun + " (ourddp.init() finds rank and size there)" + kOtherwise;
}

void check_alike(const std::vector<Word>& words) {
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank].state == Word::State::Failed) {
      throw Error("rank " + std::to_string(rank) + " cannot send by MPI: " + words[rank].text);
    }
  }
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank].library != words[0].library) {
      throw Error("rank 0 has " + words[0].library + " and rank " + std::to_string(rank) + " has " +
                  words[rank].library + ": all have to use the same MPI" + kOtherwise);
    }
  }
}

}  // namespace

Word Word::failure(std::string text) {
  Word word;
  word.text = std::move(text);
  return word;
}

std::string Word::write() const {
  return std::to_string(static_cast<int>(state)) + "\n" + std::to_string(rank) + "\n" + job + "\n" + library + "\n" +
         text;
}

Word Word::read(const std::string& written) {
  std::istringstream in(written);
  Word word;
  int state = 0;
  in >> state >> word.rank;
  in.ignore(1);
  std::getline(in, word.job);
  std::getline(in, word.library);
  std::getline(in, word.text, '\0');
  word.state = static_cast<State>(state);
  return word;
}

std::string Plan::write() const {
  std::ostringstream out;
  out << nonce;
  for (const int rank : ranks) out << ' ' << rank;
  return out.str();
}

Plan Plan::read(const std::string& written) {
  std::istringstream in(written);
  Plan plan;
  in >> plan.nonce;
  for (int rank = 0; in >> rank;) plan.ranks.push_back(rank);
  return plan;
}

Plan make_plan(const std::vector<Word>& words, unsigned nonce) {
  check_alike(words);
  const std::string& library = words[0].library;
  Plan plan;
  plan.nonce = nonce;
  const auto is_alone = [](const Word& word) { return word.state == Word::State::Alone; };
  if (std::all_of(words.begin(), words.end(), is_alone)) {
    throw Error("the ranks were not started by a launcher of " + library + ", which connects no other processes. " +
                advice(library));
  }
  std::set<int> seen;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const Word& word = words[rank];
    if (is_alone(word) || word.job != words[0].job || !seen.insert(word.rank).second) {
      throw Error("the ranks are not different processes of one MPI job: rank 0 " + describe(words[0]) + ", rank " +
                  std::to_string(rank) + " " + describe(word) + ". " + advice(library));
    }
    plan.ranks.push_back(word.rank);
  }
  return plan;
}

Plan agree(const MpiMeeting& meeting, const Word& word) {
  KeyValues& keys = *meeting.keys;
  if (meeting.rank != 0) {
    keys.set(word_key(meeting.rank), word.write());
    const std::string plan = keys.get(kPlanKey, meeting.deadline);
    if (plan.rfind(kError, 0) == 0) throw Error(plan.substr(std::string(kError).size()));
    return Plan::read(plan);
  }
  std::vector<Word> words = {word};
  try {
    for (int rank = 1; rank < meeting.size; ++rank) {
      words.push_back(Word::read(keys.get(word_key(rank), meeting.deadline)));
    }
    const Plan plan = make_plan(words, std::random_device{}());
    keys.set(kPlanKey, plan.write());
    return plan;
  } catch (const TimeoutError&) {
    throw TimeoutError("rank " + std::to_string(words.size()) + " did not say that it can send by MPI within " +
                       std::to_string(meeting.deadline.timeout().count()) + " ms. Did it fail?");
  } catch (const Error& e) {
    keys.set(kPlanKey, kError + std::string(e.what()));
    throw;
  }
}

}  // namespace ours::mpi
