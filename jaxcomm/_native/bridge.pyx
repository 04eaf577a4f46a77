# cython: language_level=3, embedsignature=True
# distutils: language = c++
"""The only door between Python and the native layer: tables, capsules, eager calls."""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_New
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector

cdef extern from "native.hpp" namespace "jaxcomm" nogil:
    ctypedef long long Count

    cdef cppclass Status:
        pass

    cdef struct Constants:
        void* in_place
        int any_source, any_tag, proc_null, root, tag_ub, err_truncate
        uint64_t op_null
        size_t status_bytes, status_source_at, status_tag_at
        Count small_count_limit
    Constants constants

    cdef cppclass Communicator:
        uint64_t handle, shadow
        int rank, size, peers
        cbool two_groups
        string name
        cbool freed
        uint64_t graph, reversed_graph
        vector[int] in_edges, out_edges
        int64_t identity
        vector[int] in_world
        cbool mixed

    cdef cppclass Reduction:
        const void* handle_at
        string name
        const void* alive_at
    void set_raised_ "jaxcomm::set_raised"(int64_t, string) except +

    cdef cppclass Datatype:
        uint64_t handle
        int per_element, bytes
        string name

    cdef cppclass Table[Row]:
        int64_t add(Row) except +
        Row& at(int64_t) except +
    cdef cppclass Sites:
        void add(int64_t, string) except +
        string at(int64_t) except +
    Sites sites

    cdef struct Facts:
        const char* operation
        int64_t comm, elements, op, root, dest, sendtag, source, recvtag, site, apart
        int code
        cbool mpi4pys
    int64_t unknown "jaxcomm::Facts::kUnknown"

    cdef struct Record:
        int64_t number, began, ended, here, request
        int thread
        cbool failed, waits
        Facts facts

    cdef cppclass Messages:
        int64_t add(uint64_t)
    Messages messages

    cdef cppclass Recorder:
        int64_t begin(const Facts&)
        void end(int64_t, cbool)
        void keep_all(cbool)
        vector[Record] take_all()
    Recorder recorder

    Table[Communicator] communicators
    Table[Reduction] reductions
    Table[Status*] statuses
    Table[Datatype] datatypes
    int64_t datatype_of_code[64]
    const Datatype* datatype_of(int)

    cdef struct List:
        const int64_t* data
        size_t size

    cdef cppclass Attributes:
        cbool set(string, int64_t)
        cbool set_list(string, List)

    cdef struct Buffer:
        void* data
        Count elements
        int code

    cdef cppclass Frame:
        Buffer operands[16]
        Buffer results[16]
        int n_operands, n_results
        Attributes attributes
        Status* status

    cdef cppclass Tree:
        vector[Buffer] operands, results
        Attributes attributes
        Status* status

    cdef struct Outcome:
        int code
        string message

    cdef struct Operation:
        const char* name
        void* ffi_handler

    cdef cppclass AtomicCount "std::atomic<std::int64_t>":
        int64_t load()
        void store(int64_t)
    AtomicCount ended_programs
    void* end_handler()
    void* empty_handler()
    string load_mpi(string, cbool)
    cbool has_large_counts "jaxcomm::has_large_counts"()
    pair[int, int] ffi_version_ "jaxcomm::ffi_version"()
    cdef cppclass atomic_bool "std::atomic<bool>":
        cbool load()
        void store(cbool)
    atomic_bool checking_ "jaxcomm::checking"
    void set_small_counts_ "jaxcomm::set_small_counts"(Count)
    void set_debug_ "jaxcomm::set_debug"(cbool)
    vector[Operation] operations()
    int operation_index_ "jaxcomm::operation_index"(string)
    Outcome run_operation(int, Frame&)
    Outcome run_tree_operation(int, Tree&)
    int64_t add_own_reduction_ "jaxcomm::add_own_reduction"(string, string) except +
    void check_operation_ "jaxcomm::check_operation"(int64_t, string, int64_t) except +
    void carry_notes_ "jaxcomm::carry_notes"(uint64_t) except +
    cbool free_communicator_ "jaxcomm::free_communicator"(int64_t) except +
    enum class Then(int):
        kWait
        kRaise
        kAbort
    cdef struct Watch:
        double seconds
        Then then
        string directory, host
        uint64_t comm, world
        cbool exchanges
        int rank, size
    void start_watchdog_ "jaxcomm::start_watchdog"(Watch) except +
    void stop_watchdog_ "jaxcomm::stop_watchdog"()
    void listen_to_signals_ "jaxcomm::listen_to_signals"()
    vector[pair[string, int64_t]] counts_ "jaxcomm::counts"() except +
    atomic_bool forked_ "jaxcomm::forked"
    const char* kForked
    vector[string] open_requests_ "jaxcomm::open_requests"() except +
    void leave_requests_ "jaxcomm::leave_requests"(int) except +

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)

# The head of NumPy's array struct, whose layout its C API fixes: reading it costs nothing, while the buffer protocol
# refuses bfloat16 and `ndarray.ctypes` takes a microsecond.
cdef extern from *:
    """
    #include <Python.h>
    typedef struct {
      PyObject_HEAD char* data;
      int axes;
      void *dimensions, *strides, *base, *descr;
      int flags;
    } JaxcommArrayHead;
    enum { JAXCOMM_ARRAY_WRITEABLE = 0x0400 };
    """
    ctypedef struct JaxcommArrayHead:
        char* data
        int flags
    int JAXCOMM_ARRAY_WRITEABLE

TRACED = -2**63
"""The value of an attribute that is a scalar operand at run time."""

for _code in range(64):
    datatype_of_code[_code] = -1


class NativeError(Exception):
    """An operation failed: args are MPI's error code (-1 where MPI was not the cause) and the message."""


def load(str library_path, bint handles_are_pointers):
    """Bind the MPI entry points of a library that is loaded already; ImportError says what is missing."""
    cdef string error = load_mpi(library_path.encode(), handles_are_pointers)
    if not error.empty():
        raise ImportError(error.decode())


def set_constants(*, in_place, op_null, int any_source, int any_tag, int proc_null, int root, int tag_ub,
                  int err_truncate, size_t status_bytes, size_t status_source_at, size_t status_tag_at):
    """Tell the native layer what an mpi.h would have told it."""
    constants.in_place = <void*><uintptr_t>(in_place & 0xFFFFFFFFFFFFFFFF)
    constants.op_null = op_null & 0xFFFFFFFFFFFFFFFF
    constants.any_source, constants.any_tag, constants.proc_null = any_source, any_tag, proc_null
    constants.root, constants.tag_ub, constants.err_truncate = root, tag_ub, err_truncate
    constants.status_bytes = status_bytes
    constants.status_source_at, constants.status_tag_at = status_source_at, status_tag_at


def add_datatype(int code, uint64_t handle, int per_element, int itemsize, str name):
    """Say which MPI datatype carries XLA's element type `code`."""
    cdef Datatype row
    if not 0 <= code < 64:
        raise ValueError(f"no element type of XLA's has the number {code}")
    row.handle, row.per_element, row.bytes, row.name = handle, per_element, itemsize, name.encode()
    datatype_of_code[code] = datatypes.add(row)


def add_communicator(uint64_t handle, uint64_t shadow, int rank, int size, int peers, bint two_groups, str name):
    """Return the index by which compiled programs name this communicator.

    `shadow` is a duplicate, or the same handle, for the messages that differentiation adds. `peers` are the ranks of
    the other group, if there are two.
    """
    cdef Communicator row
    row.shadow = shadow
    row.handle, row.rank, row.size, row.name = handle, rank, size, name.encode()
    row.peers, row.two_groups = peers, two_groups
    return communicators.add(row)


def free_communicator(int64_t index):
    """Mark the slot: what starts on it later fails, and no other communicator takes it.

    Returns: whether MPI may free it. Else it has requests under way, for which it must stay.
    """
    return free_communicator_(index)


def set_graphs(int64_t index, uint64_t graph, uint64_t reversed_graph, list in_edges, list out_edges):
    """Say which distributed graphs, with which edges of its topology, a communicator's neighbour collectives use."""
    communicators.at(index).graph, communicators.at(index).reversed_graph = graph, reversed_graph
    communicators.at(index).in_edges, communicators.at(index).out_edges = in_edges, out_edges


def check_operation(int64_t index, str operation, int64_t site):
    """Compare with the other ranks, before a method of mpi4py's own; RuntimeError if they are to do something else."""
    cdef string name = operation.encode()
    with nogil:
        check_operation_(index, name, site)


def introduce(int64_t index, int64_t identity, list in_world):
    """Say by which number all its ranks know a communicator, and what ranks these are in the world: for notes.hpp."""
    communicators.at(index).in_world = in_world
    communicators.at(index).identity = identity


def add_message(uint64_t handle):
    """Take over a message that mpi4py's matched probe has found, and return the number by which a receive knows it."""
    return messages.add(handle)


cdef dict _host_names = {}  # what mpi4py's methods are called, as bytes that stay


cdef int64_t _begin_on_host(str name, int64_t comm, int64_t site):
    kept = _host_names.get(name)
    if kept is None:
        kept = _host_names[name] = f"mpi4py's {name}".encode()
    cdef Facts facts
    facts.operation, facts.comm, facts.site, facts.mpi4pys = <bytes>kept, comm, site, True
    return recorder.begin(facts)


cpdef on_host(method, comm, tuple args, dict kwargs, int64_t slot, int64_t site):
    """Call a method of mpi4py's, on the record."""
    cdef int64_t number = _begin_on_host(method.__name__, slot, site)
    try:
        result = method(comm, *args, **kwargs)
    except BaseException:
        recorder.end(number, True)
        raise
    recorder.end(number, False)
    return result


def mix(int64_t index):
    """Say that a communicator has messages that are mpi4py's own."""
    communicators.at(index).mixed = True


def carry_notes(uint64_t world):
    """Let notes on messages travel on a duplicate of the world from now on."""
    carry_notes_(world)


def rename_communicator(int64_t index, str name):
    """Use `name` in messages from now on."""
    communicators.at(index).name = name.encode()


def add_reduction(uintptr_t handle_at, str name, uintptr_t alive_at=0):
    """Return the index by which compiled programs name the MPI operation whose handle is kept at an address.

    `alive_at` is where the user's operation keeps its handle, if this one calls that.
    """
    cdef Reduction row
    row.alive_at = <const void*>alive_at
    row.handle_at, row.name = <const void*>handle_at, name.encode()
    return reductions.add(row)


def set_raised(int64_t index, str text):
    """Say that a user's operation has raised an exception: the call that it was called by fails."""
    set_raised_(index, text.encode())


def add_own_reduction(str name, str dtype):
    """Make an operation of reduce_ops.hpp and return the index by which compiled programs name it."""
    return add_own_reduction_(name.encode(), dtype.encode())


def add_status(uintptr_t address):
    """Return the index of an MPI_Status in memory that the caller keeps alive."""
    return statuses.add(<Status*>address)


def add_site(int64_t number, str text):
    """Say where the operations are written that carry this number."""
    sites.add(number, text.encode())


def counts():
    """Return how many rows each native table has, and how many messages and requests are open: {what: number}."""
    return {what.decode(): number for what, number in counts_()}


def forked():
    """Whether this process was forked from a rank, and is none itself."""
    return forked_.load()


def refuse_forked():
    """Raise RuntimeError in a process that was forked from a rank."""
    if forked_.load():
        raise RuntimeError((<bytes>kForked).decode())


def open_requests():
    """Return what was started and never waited for, in words."""
    return [text.decode() for text in open_requests_()]


def leave_requests(int milliseconds):
    """Cancel the receives that nobody waits for, and give the rest some time to end."""
    with nogil:
        leave_requests_(milliseconds)


def start_watchdog(double seconds, int then, str directory, str host, comm, uint64_t world, int rank, int size):
    """Start the watchdog's thread, or change what it watches for.

    Args:
      seconds: an operation may take; 0 for any time. then: 0 goes on waiting, 1 raises, 2 ends the job.
      directory: where reports go. host: this machine's name.
      comm: the handle of a duplicate of COMM_WORLD, on which ranks ask each other; None if they cannot.
      world: the handle of COMM_WORLD. rank, size: there.
    """
    cdef Watch watch
    watch.seconds, watch.then, watch.directory, watch.host = seconds, <Then>then, directory.encode(), host.encode()
    watch.exchanges, watch.comm = comm is not None, comm or 0
    watch.world, watch.rank, watch.size = world, rank, size
    with nogil:
        start_watchdog_(watch)


def stop_watchdog():
    """End the watchdog's thread, before MPI ends."""
    with nogil:
        stop_watchdog_()


def listen_to_signals():
    """Let the watchdog hear SIGUSR1 and SIGINT, which go on to whoever had them."""
    listen_to_signals_()


def large_counts():
    """Whether the MPI library has the large-count functions of MPI 4."""
    return has_large_counts()


def checking():
    """Whether ranks tell each other what they are about to do, before each collective."""
    return checking_.load()


def set_checking(cbool on):
    """Turn checking mode on or off."""
    checking_.store(on)


cdef int _observers = 0
cdef object _profiled = bool


def observe(int more):
    """Say that so many more (or less) want every operation to know its place in the program, at some cost."""
    global _observers
    _observers += more


def observed():
    """Whether operations are to know their place in the program, also those outside jit."""
    return _observers > 0 or checking_.load()


def set_profiled(profiled):
    """Say how to ask whether a profiler of JAX's runs."""
    global _profiled
    _profiled = profiled


def keep_records(cbool on):
    """From now on keep what is recorded of every operation that ends, or stop that."""
    recorder.keep_all(on)


def take_records():
    """Return what was kept, in the order in which operations ended, and keep it no longer.

    Returns: for each operation a tuple: its number, from 1, and its name; when it began and ended, in nanoseconds of
      the steady clock; the number of its thread, from 1; whether it failed; the number of the operation that started
      the request that it waits for, 0 if that is not known, None if it waits for none; the row of its communicator, and
      which duplicate of that (Facts.apart); elements, dtype and bytes of its payload; op; root; dest, sendtag; source,
      recvtag; where the operation (or the one that started the request) is written; where the call itself is. What an
      operation does not have is None.
    """
    cdef vector[Record] records = recorder.take_all()
    cdef size_t i
    cdef dict places = {}
    return [_facts_of(records[i], places) for i in range(records.size())]


cdef tuple _facts_of(const Record& record, dict places):
    cdef const Facts* facts = &record.facts
    cdef const Datatype* dtype = datatype_of(facts.code) if facts.code != 0 else NULL
    site = _place(facts.site, places)
    return (
        record.number, facts.operation.decode(), record.began, record.ended, record.thread, bool(record.failed),
        record.request if record.waits else None, facts.comm, facts.apart,
        facts.elements if dtype != NULL else 0,
        dtype.name.decode() if dtype != NULL else None,
        facts.elements * dtype.bytes if dtype != NULL else 0,
        reductions.at(facts.op).name.decode() if facts.op >= 0 else None,
        _if_known(facts.root),
        _if_known(facts.dest), facts.sendtag if facts.dest != unknown else None,
        _if_known(facts.source), facts.recvtag if facts.source != unknown else None,
        site, _place(record.here, places) if record.waits else site,
    )


cdef object _if_known(int64_t value):
    return None if value == unknown else value


cdef object _place(int64_t site, dict places):
    text = places.get(site)
    if text is None:
        text = places[site] = sites.at(site).decode()
    return text or None


def communicator_name(int64_t index):
    """Return what messages call a communicator."""
    return communicators.at(index).name.decode()


def ffi_version():
    """The version of XLA's FFI that this was built with: major, minor."""
    return ffi_version_()


def set_small_counts(Count limit):
    """Do without the large-count functions, with at most so many elements a call; 0 for what is usual. For tests."""
    set_small_counts_(limit)


def set_debug(bint on):
    """Log every operation to stderr."""
    set_debug_(on)


def capsules():
    """Return {operation: capsule of its XLA FFI handler}."""
    return {op.name.decode(): PyCapsule_New(op.ffi_handler, NULL, NULL) for op in operations()}


def program_capsules():
    """Return the capsules of two handlers: one counts the programs of jaxcomm.jit that have ended, one does nothing."""
    return {"end": PyCapsule_New(end_handler(), NULL, NULL), "nothing": PyCapsule_New(empty_handler(), NULL, NULL)}


def operation_index(str name):
    """Return the number by which `call` knows an operation."""
    cdef int index = operation_index_(name.encode())
    if index < 0:
        raise KeyError(name)
    return index


cdef set_attributes(Attributes* into, vector[vector[int64_t]]* lists, dict given):
    """Set {name: int or tuple of int}; `lists` keeps what the attributes point to."""
    cdef List view
    for name, value in given.items():
        if isinstance(value, tuple):
            lists.push_back(value)  # moves the vectors, not what they hold
            view.data, view.size = lists.back().data(), lists.back().size()
            into.set_list((<str>name).encode(), view)
        else:
            into.set((<str>name).encode(), value)


cdef class Plan:
    """An operation with everything but the buffers: what the eager path keeps for the next call of the same kind."""

    cdef Frame frame
    cdef int operation
    cdef vector[vector[int64_t]] lists  # what the frame's attributes point to

    def __init__(self, int operation, list operands, list results, dict attributes):
        """Prepare.

        Args:
          operation: from operation_index.
          operands, results: for each array its number of elements and XLA's element type.
          attributes: {name: int or tuple of int}.
        """
        cdef int i
        if len(operands) > 16 or len(results) > 16:
            raise ValueError(f"at most 16 operands and 16 results, got {len(operands)} and {len(results)}")
        self.operation = operation
        self.frame.n_operands, self.frame.n_results = len(operands), len(results)
        for i, (elements, code) in enumerate(operands):
            self.frame.operands[i].elements, self.frame.operands[i].code = elements, code
        for i, (elements, code) in enumerate(results):
            self.frame.results[i].elements, self.frame.results[i].code = elements, code
        set_attributes(&self.frame.attributes, &self.lists, attributes)

    def run(self, list operands, list results, uintptr_t status):
        """Run on C-contiguous NumPy arrays, with the GIL released.

        Args:
          operands: arrays as prepared for. results: likewise; they are overwritten.
          status: address of an MPI_Status to fill, or 0.
        Raises:
          NativeError: with MPI's error code and the message.
        """
        cdef Frame frame = self.frame
        cdef Outcome outcome
        cdef int i
        for i in range(frame.n_operands):
            frame.operands[i].data = (<JaxcommArrayHead*><void*>operands[i]).data
        for i in range(frame.n_results):
            frame.results[i].data = (<JaxcommArrayHead*><void*>results[i]).data
        frame.status = <Status*>status
        with nogil:
            outcome = run_operation(self.operation, frame)
        if outcome.code != 0:
            raise NativeError(outcome.code, outcome.message.decode())


cdef class TreePlan:
    """As Plan, for an operation on any number of leaves."""

    cdef Tree tree
    cdef int operation
    cdef vector[vector[int64_t]] lists  # as Plan's

    def __init__(self, int operation, list operands, list results, dict attributes):
        """Prepare, as Plan."""
        cdef Buffer buffer
        self.operation = operation
        buffer.data = NULL
        for elements, code in operands:
            buffer.elements, buffer.code = elements, code
            self.tree.operands.push_back(buffer)
        for elements, code in results:
            buffer.elements, buffer.code = elements, code
            self.tree.results.push_back(buffer)
        set_attributes(&self.tree.attributes, &self.lists, attributes)

    def run(self, list operands, list results, uintptr_t status):
        """Run, as Plan."""
        cdef Tree tree = self.tree
        cdef Outcome outcome
        cdef size_t i
        for i in range(tree.operands.size()):
            tree.operands[i].data = (<JaxcommArrayHead*><void*>operands[i]).data
        for i in range(tree.results.size()):
            tree.results[i].data = (<JaxcommArrayHead*><void*>results[i]).data
        tree.status = <Status*>status
        with nogil:
            outcome = run_tree_operation(self.operation, tree)
        if outcome.code != 0:
            raise NativeError(outcome.code, outcome.message.decode())


# What is under way. One program of jaxcomm.jit at a time: the next one starts when the communication of the last one
# has ended, which that one counts itself (end_handler). Asking JAX would cost more than a small program takes.
#
# The count is that of the thread that imports jaxcomm. As soon as another one runs programs, it means nothing.

cdef unsigned long _owner = PyThread_get_thread_ident()
cdef bint _counting = True
cdef int64_t _begun = 0
cdef object _last = None
cdef object _trace_context = None, _trace_name = None, _no_trace = None, _tokens = None, _effect = None


def set_dispatch(trace_context, no_trace, tokens, effect):
    """Say where JAX keeps its current trace and tokens, which trace it is when nothing is traced, and our effect."""
    global _trace_context, _trace_name, _no_trace, _tokens, _effect
    (_trace_context, _trace_name), _no_trace, _tokens, _effect = trace_context, no_trace, tokens, effect


def owns_count():
    """Whether this thread is the one whose programs are counted."""
    return _owner == PyThread_get_thread_ident()


def give_up_count():
    """Count no more: several threads run programs."""
    global _counting
    _counting = False


def last_program():
    """Return what the owner's last program returned to wait for, or None if it has ended."""
    return None if _counting and ended_programs.load() == _begun else _last


def settle():
    """Note that no program of the owner is under way."""
    global _last
    _last = None
    ended_programs.store(_begun)


cdef inline bint _has_token(dict tokens):
    return len(tokens) > 0 and _effect in tokens  # others have effects too


cdef inline bint _quiet():
    """Whether nothing is traced or under way in this thread, as far as can be told without asking JAX."""
    return (
        _counting
        and _owner == PyThread_get_thread_ident()
        and ended_programs.load() == _begun
        and getattr(_trace_context, _trace_name) is _no_trace
        and not forked_.load()
        and not _has_token(_tokens.current_tokens)
    )


def dispatch(program, careful, tuple args, dict kwargs):
    """Return the result of program(*args, **kwargs) if nothing is under way, else careful(args, kwargs)."""
    return run_program(program, args, kwargs) if _quiet() else careful(args, kwargs)


cpdef run_program(program, tuple args, dict kwargs):
    """Call program(*args, **kwargs) -> (what to wait for, result) in the owner's thread and return the result."""
    global _begun, _last
    _begun += 1
    try:
        _last, result = program(*args, **kwargs)
    except BaseException:
        settle()
        raise
    return result


# Calls on concrete arrays that were made before with the same kind of arguments: straight to MPI.

MISSED = object()
"""What Shortcuts.run returns if it did nothing."""

cdef object _array_type = None, _op_type = None, _numpy_type = None, _x64 = None, _caller = None
cdef object _put = None, _empty = None, _failed = None
cdef int64_t _kept = 0
cdef list _device = []
cdef object _sharding = None
cdef int _most_shortcuts = 4096


def set_kinds(*, array_type, op_type, numpy_type, x64, caller):
    """Say what shortcuts need to know of arguments.

    Args:
      array_type, numpy_type, op_type: the classes of JAX arrays, NumPy arrays and MPI operations.
      x64: has a `value` that is true when 64 bits are enabled.
      caller: () -> the number of the place in the user's program that is calling.
    """
    global _array_type, _op_type, _numpy_type, _x64, _caller
    _array_type, _op_type, _numpy_type, _x64, _caller = array_type, op_type, numpy_type, x64, caller


def set_eager(*, put, empty, kept, failed, device, sharding):
    """Say what shortcuts need to know of results.

    Args:
      put: (aval, sharding, [x], [device], committed) -> JAX array.
      empty: aval -> NumPy array, aligned as `put` needs it to be to use its memory.
      kept: how many bytes a shortcut may keep for further results.
      failed: (code, message) -> exception. device, sharding: where results go.
    """
    global _put, _empty, _kept, _failed, _device, _sharding
    _put, _empty, _kept, _failed, _device, _sharding = put, empty, kept, failed, [device], sharding


cdef class Shortcut:
    """A plan, and how its operands and its result follow from the arguments of a method."""

    cdef Plan plan
    cdef tuple operands
    cdef object aval, keep
    cdef list memory
    cdef int next, most
    cdef int returns
    cdef bint committed

    def __init__(self, Plan plan, tuple operands, int returns, aval, bint committed, keep):
        """Prepare.

        Args:
          plan: what to run.
          operands: for each, which of the arrays among the arguments it is.
          returns: -1: a new array, the first result; -2: None; else which of the arrays among the arguments.
          aval: of the first result, or None if there is none. committed: whether it is bound to its device.
          keep: what must live as long as this, since keys have its address.
        """
        if plan.frame.n_operands > 4:
            raise ValueError(f"at most 4 operands, got {plan.frame.n_operands}")
        self.plan, self.operands, self.returns, self.aval, self.committed = plan, operands, returns, aval, committed
        self.keep = keep
        self.memory, self.next = [], 0
        if aval is not None:
            size = plan.frame.results[0].elements * aval.dtype.itemsize
            self.most = min(64, _kept // max(size, 1))


cdef class HostCall:
    """A call that is mpi4py's own."""

    cdef object method, keep

    def __init__(self, method, keep):
        """Prepare. keep: what must live as long as this, since keys have its address."""
        self.method, self.keep = method, keep


cdef class Shortcuts:
    """Those of one method, by the kind of its arguments."""

    cdef dict known

    def __init__(self):
        self.known = {}

    def learn(self, comm, tuple args, dict kwargs, how):
        """Remember how to do what was just done with these arguments: a Shortcut or a HostCall."""
        key = _key(comm, args, kwargs, [])
        if key is not None:
            if len(self.known) >= _most_shortcuts:
                self.known.clear()
            self.known[key] = how

    def run(self, comm, tuple args, dict kwargs, bint shown=False):
        """Do a call that is known and return what the method returns, or MISSED.

        It is not done while a profiler of JAX's runs, unless it is `shown` there already.
        """
        cdef list arrays = []
        if not _quiet() or (not shown and _profiled()):
            return MISSED
        key = _key(comm, args, kwargs, arrays)
        if key is None:
            return MISSED
        known = self.known.get(key)
        if known is None or communicators.at(key[0]).freed:
            return MISSED
        if type(known) is HostCall:
            if checking_.load():  # the long way tells other ranks
                return MISSED
            return on_host((<HostCall>known).method, comm, args, kwargs, key[0], key[1])
        return _run_shortcut(known, arrays)


cdef object _key(comm, tuple args, dict kwargs, list arrays):
    """What decides how a call goes, hashable, or None; the arrays among its arguments are appended to `arrays`."""
    slot = getattr(comm, "_slot", None)
    if slot is None:
        return None
    # Whoever wants to know a call's place gets a plan for that place alone.
    cdef list key = [slot, _caller() if _observers > 0 or checking_.load() else 0]
    for value in args:
        if not _add_to_key(key, value, arrays):
            return None
    for name, value in kwargs.items():
        key.append(name)
        if not _add_to_key(key, value, arrays):
            return None
    return tuple(key)


cdef bint _add_to_key(list key, value, list arrays) except -1:
    kind = type(value)
    key.append(kind)
    if kind is _array_type:
        aval = value.aval
        key.append(aval.shape)
        key.append(aval.dtype)
        key.append(value._committed)
        arrays.append(value)
    elif kind is _numpy_type:
        key.append(value.shape)
        key.append(value.dtype)
        key.append((<JaxcommArrayHead*><void*>value).flags & JAXCOMM_ARRAY_WRITEABLE)  # else it is only a template
        key.append(_x64.value)
        arrays.append(value)
    elif kind is _op_type:
        key.append(<uintptr_t><void*>value)
    elif kind is int or kind is bool or value is None:
        key.append(value)
    elif kind is list or kind is tuple:  # counts
        for item in value:
            if type(item) is not int:
                return False
        key.append(tuple(value))
    else:
        return False
    return True


cdef object _memory(Shortcut known):
    """An array for a result: one that JAX has let go of, else a new one. JAX keeps it as long as its array lives."""
    cdef int n = len(known.memory)
    for _ in range(n):
        known.next = known.next + 1 if known.next + 1 < n else 0
        array = known.memory[known.next]
        if Py_REFCNT(array) == 2:  # the list's and this variable's
            return array
    array = _empty(known.aval)
    if n < known.most:
        known.memory.append(array)
    return array


cdef object _run_shortcut(Shortcut known, list arrays):
    cdef Frame frame = known.plan.frame
    cdef Py_buffer views[4]
    cdef Outcome outcome
    cdef int held = 0, i
    result = None
    try:
        for i in range(frame.n_operands):
            try:
                PyObject_GetBuffer(arrays[known.operands[i]], &views[i], PyBUF_C_CONTIGUOUS)
            except Exception:  # another layout, another device, deleted: the long way knows what to do or say
                return MISSED
            held += 1
            frame.operands[i].data = views[i].buf
        if known.aval is not None:
            result = _memory(known)
            frame.results[0].data = (<JaxcommArrayHead*><void*>result).data
        with nogil:
            outcome = run_operation(known.plan.operation, frame)
    finally:
        for i in range(held):
            PyBuffer_Release(&views[i])
    if outcome.code != 0:
        raise _failed(outcome.code, outcome.message.decode())
    if known.returns == -1:
        return _put(known.aval, _sharding, [result], _device, known.committed)
    return None if known.returns == -2 else arrays[known.returns]
