#ifndef DDL_TESTS_SOAK_H_
#define DDL_TESTS_SOAK_H_

// Runs random collectives and checks every element; returns the exit code of this rank. After argv[1]
// come words name=value, all optional:
//   seed=, collectives=, bytes= (largest tensor or group)
//   shuffle=1   each rank submits up to 8 collectives in an order of its own
//   wrong=N     1 in N is wrong on one rank, on purpose: every rank must get an error that names it
//   folder=     write a journal folder/rank-<n>: "pid", "started", a line "<index> <hash of the
//               result>" for each collective, "error <code> <message>", "WRONG …", "done …", "left"
//   alone=1     a rank that meets an error exits without telling anyone; only allreduces, without
//               unfused and checked ones: the others go over MPI, which waits for the dead
int Soak(int argc, char** argv);

// Runs one collective, in place where it can be, on count= elements of dtype= on each rank, and
// checks them: kind=allreduce, broadcast or allgather. Returns the exit code of this rank.
int OneLarge(int argc, char** argv);

#endif  // DDL_TESTS_SOAK_H_
