"""Names of operations and contenders, for who starts jobs and judges figures and needs neither JAX nor MPI."""

PING_PONG = "Send/Recv"
SIX = ["Allreduce", "Bcast", "Allgather", "Alltoall", "Sendrecv", PING_PONG]
# Where MPI can leave the result in the operand's place.
IN_PLACE = ["Allreduce", "Bcast", "Scan", "Sendrecv_replace"]
EVERY = list(dict.fromkeys(SIX + IN_PLACE))

# mpi4py, jaxcomm, mpi4jax where there is one; and what a call and a loop cost without communication.
CONTENDERS = [
    "mpi4py",
    "eager",
    "jax.jit",
    "jaxcomm.jit",
    "loop",
    "mpi4jax eager",
    "mpi4jax jit",
    "mpi4jax loop",
    "io_callback",
]
BASELINES = ["plain call", "empty loop"]
IN_LOOPS = ["mpi4py", "loop", "mpi4jax loop", "empty loop"]
# One JAX program of all processes: in jobs of their own, with mpi4py for comparison.
GLOO = ["gloo", "gloo loop"]
