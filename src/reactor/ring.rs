//! The io_uring of a reactor thread: operations on files, readiness of sockets, and sleeping.
//!
//! Each operation sits in a slot that owns its bytes and a reference on its file from submission to
//! completion. A future that is dropped early leaves an orphan: the slot is freed, and the bytes released,
//! when the kernel reports completion. That is the one rule the unsafe code here rests on, *the slot rule*:
//! what a submitted entry points at is owned by its slot until its completion entry has been read.
//!
//! The kernel is entered only when entries wait to be submitted or when it has raised the ring's TASKRUN
//! flag, which says in plain memory that completions are to be had; so neither parked sockets nor device
//! operations in flight cost a system call per turn. A device with little to do gets each operation at once.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::memory::{DmaBuf, DmaSlice};

/// Entries between two enters; more operations than this may be in flight.
const SUBMISSION_ENTRIES: u32 = 512;
const COMPLETION_ENTRIES: u32 = 8192;

/// With no more operations than this in flight, one more goes to the kernel at once: a device that has little to do must
/// not wait until the reactor has gone through all that came in with it. Beyond, entries are handed over in batches.
const PROMPT_IN_FLIGHT: usize = 64;
const BATCH_ENTRIES: usize = 16;

/// Completion entries that belong to no slot.
const TAG_KICK: u64 = u64::MAX;
const TAG_CANCEL: u64 = u64::MAX - 1;

/// How long a stopping reactor waits for operations in flight before it gives their memory up.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes one operation moves at most: the kernel's MAX_RW_COUNT, in whole 4 KiB.
pub const MAX_TRANSFER: usize = 0x7fff_f000;

thread_local! {
    static RING: RefCell<Option<Ring>> = const { RefCell::new(None) };
}

/// An open file that operations keep open until they have completed. Cheap to clone.
#[derive(Clone)]
pub struct RingFile(Arc<OwnedFd>);

impl RingFile {
    pub fn new(fd: OwnedFd) -> RingFile {
        RingFile(Arc::new(fd))
    }

    fn target(&self) -> types::Fd {
        types::Fd(self.0.as_raw_fd())
    }
}

impl AsFd for RingFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

struct Ring {
    uring: IoUring,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Entries that found the submission queue full and unwilling to drain.
    backlog: VecDeque<squeue::Entry>,
    in_flight: usize,
    event: Arc<EventFd>,
    event_value: Box<[u8; 8]>,
    kick_armed: bool,
    enters: u64,
}

struct Slot {
    /// Tells a slot's present operation from earlier ones, for cancellation.
    generation: u32,
    state: State,
    waker: Option<Waker>,
    payload: Payload,
    file: Option<RingFile>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    InFlight,
    /// In flight, and nobody waits.
    Orphaned,
    Done(i32),
}

/// What an operation owns while the kernel works on it.
enum Payload {
    Nothing,
    Buf(DmaBuf),
    Slice(DmaSlice),
    List(Box<List>),
}

struct List {
    slices: Vec<DmaSlice>,
    vectors: Vec<libc::iovec>,
}

/// The reactor loop's grip on its thread's ring; the ring goes when this is dropped.
pub(super) struct Driver {
    _not_send: PhantomData<*mut ()>,
}

impl Driver {
    /// Sets up this thread's ring, and the function by which any thread ends its [`Driver::wait`].
    pub(super) fn new() -> io::Result<(Driver, Box<dyn Fn() + Send + Sync>)> {
        let event = Arc::new(EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC)?);
        let ring = Ring {
            uring: set_up()?,
            slots: Vec::new(),
            free: Vec::new(),
            backlog: VecDeque::new(),
            in_flight: 0,
            event: Arc::clone(&event),
            event_value: Box::new([0; 8]),
            kick_armed: false,
            enters: 0,
        };
        RING.with(|slot| *slot.borrow_mut() = Some(ring));
        let kick = move || {
            // Fails only when the counter is full, and then the sleeper is awake.
            let _ = event.write(1);
        };
        Ok((Driver { _not_send: PhantomData }, Box::new(kick)))
    }

    /// Submits what waits to be submitted and hands out completions. True if there were any.
    pub(super) fn turn(&mut self) -> bool {
        with_ring(Ring::turn).unwrap_or(false)
    }

    /// Sleeps until a completion, a kick or the timeout.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        with_ring(|ring| {
            ring.arm_kick();
            ring.wait(timeout);
        });
    }

    /// Enters made, operations in flight.
    pub(super) fn counters(&self) -> (u64, u64) {
        with_ring(|ring| (ring.enters, ring.in_flight as u64)).unwrap_or_default()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let ring = RING.with(|slot| slot.borrow_mut().take());
        if let Some(ring) = ring {
            ring.drain();
        }
    }
}

fn with_ring<T>(f: impl FnOnce(&mut Ring) -> T) -> Option<T> {
    RING.try_with(|ring| ring.borrow_mut().as_mut().map(f)).ok().flatten()
}

/// The cheapest kind of ring this kernel offers: completions are delivered only when this thread enters
/// (Linux 6.1), else without interrupting it (5.19).
fn set_up() -> io::Result<IoUring> {
    let builder = || {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETION_ENTRIES).setup_clamp().setup_taskrun_flag().dontfork();
        builder
    };
    let uring = match builder().setup_single_issuer().setup_defer_taskrun().build(SUBMISSION_ENTRIES) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            builder().setup_coop_taskrun().build(SUBMISSION_ENTRIES)?
        }
        other => other?,
    };
    if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    Ok(uring)
}

impl Ring {
    fn turn(&mut self) -> bool {
        self.refill();
        if self.wants_enter() {
            self.submit();
        }
        self.reap()
    }

    fn wants_enter(&mut self) -> bool {
        let queue = self.uring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.refill();
        if !self.backlog.is_empty() {
            return;
        }
        let span = timeout.map(types::Timespec::from);
        let mut args = types::SubmitArgs::new();
        if let Some(span) = &span {
            args = args.timespec(span);
        }
        self.enters += 1;
        // ETIME is the timeout, EINTR a signal; either way the loop looks around and decides anew.
        let _ = self.uring.submitter().submit_with_args(1, &args);
    }

    /// Hands out every completion that is in the queue.
    fn reap(&mut self) -> bool {
        let mut any = false;
        loop {
            let Some(entry) = self.uring.completion().next() else { return any };
            any = true;
            match entry.user_data() {
                TAG_KICK => self.kick_armed = false,
                TAG_CANCEL => {}
                tag => self.complete(tag as u32, entry.result()),
            }
        }
    }

    fn complete(&mut self, index: u32, result: i32) {
        self.in_flight -= 1;
        let slot = &mut self.slots[index as usize];
        match slot.state {
            State::InFlight => {
                slot.state = State::Done(result);
                if let Some(waker) = slot.waker.take() {
                    waker.wake();
                }
            }
            State::Orphaned => {
                drop(self.release(index));
            }
            State::Free | State::Done(_) => {
                unreachable!("a completion for slot {index}, which waits for none")
            }
        }
    }

    /// Frees a slot and gives what it owned back.
    fn release(&mut self, index: u32) -> Payload {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Free;
        slot.generation = slot.generation.wrapping_add(1);
        slot.waker = None;
        slot.file = None;
        self.free.push(index);
        std::mem::replace(&mut slot.payload, Payload::Nothing)
    }

    /// Puts an operation in a slot. `entry` sees the payload where the slot keeps it.
    fn start(
        &mut self,
        payload: Payload,
        file: Option<RingFile>,
        entry: impl FnOnce(&mut Payload) -> squeue::Entry,
    ) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            let empty = Payload::Nothing;
            self.slots.push(Slot {
                generation: 0,
                state: State::Free,
                waker: None,
                payload: empty,
                file: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.state = State::InFlight;
        slot.payload = payload;
        slot.file = file;
        let entry = entry(&mut slot.payload).user_data(tag(index, slot.generation));
        self.in_flight += 1;
        let is_io = slot.file.is_some();
        self.push(entry);
        if is_io && (self.in_flight <= PROMPT_IN_FLIGHT || self.uring.submission().len() >= BATCH_ENTRIES) {
            self.submit();
        }
        index
    }

    fn push(&mut self, entry: squeue::Entry) {
        if self.backlog.is_empty() {
            if self.try_push(&entry) {
                return;
            }
            self.submit();
            if self.try_push(&entry) {
                return;
            }
        }
        self.backlog.push_back(entry);
    }

    /// Enters the kernel with what is queued. Errors are transient (EAGAIN, EBUSY, EINTR): entries stay queued for the next
    /// turn.
    fn submit(&mut self) {
        self.enters += 1;
        let _ = self.uring.submit();
    }

    fn try_push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: slot rule: what the entry points at stays valid until its completion has been read.
        unsafe { self.uring.submission().push(entry) }.is_ok()
    }

    /// Moves entries from the backlog to the submission queue while there is room.
    fn refill(&mut self) {
        while let Some(entry) = self.backlog.front().cloned() {
            if !self.try_push(&entry) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn arm_kick(&mut self) {
        if self.kick_armed {
            return;
        }
        self.kick_armed = true;
        let target = types::Fd(self.event.as_raw_fd());
        // The ring owns the eight bytes and the descriptor, and is drained before it goes.
        let entry = opcode::Read::new(target, self.event_value.as_mut_ptr(), 8).build();
        self.push(entry.user_data(TAG_KICK));
    }

    fn cancel(&mut self, index: u32) {
        let tag = tag(index, self.slots[index as usize].generation);
        self.push(opcode::AsyncCancel::new(tag).build().user_data(TAG_CANCEL));
    }

    /// Waits until no operation points at memory of this thread any more; gives up, and the memory with
    /// it, after a time.
    fn drain(mut self) {
        // Completes the read of the kick.
        let _ = self.event.write(1);
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while (self.in_flight > 0 || self.kick_armed) && Instant::now() < deadline {
            self.turn();
            if self.in_flight > 0 || self.kick_armed {
                self.wait(Some(Duration::from_millis(100)));
            }
        }
        if self.in_flight > 0 || self.kick_armed {
            tracing::error!(
                in_flight = self.in_flight,
                "operations did not complete; their memory is given up"
            );
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(std::mem::take(&mut self.event_value));
        }
    }
}

/// Slot number and generation in one user_data; never one of the reserved tags, whose high half is all ones.
fn tag(index: u32, generation: u32) -> u64 {
    u64::from(generation & 0x7FFF_FFFF) << 32 | u64::from(index)
}

/// An operation in flight. Resolves to the kernel's result and what the operation owned.
struct Operation {
    index: Option<u32>,
    cancel_on_drop: bool,
    /// The slot is in this thread's ring.
    _not_send: PhantomData<*mut ()>,
}

impl Operation {
    /// Gives the payload back when this thread has no ring.
    fn start(
        payload: Payload,
        file: Option<RingFile>,
        entry: impl FnOnce(&mut Payload) -> squeue::Entry,
    ) -> Result<Operation, Payload> {
        let mut payload = Some(payload);
        let index = with_ring(|ring| {
            let payload = payload.take().unwrap_or(Payload::Nothing);
            ring.start(payload, file, entry)
        });
        match index {
            Some(_) => Ok(Operation { index, cancel_on_drop: false, _not_send: PhantomData }),
            None => Err(payload.unwrap_or(Payload::Nothing)),
        }
    }
}

impl Future for Operation {
    type Output = (io::Result<usize>, Payload);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(index) = self.index else { return Poll::Ready((Err(no_ring()), Payload::Nothing)) };
        let done = with_ring(|ring| {
            let slot = &mut ring.slots[index as usize];
            if let State::Done(result) = slot.state {
                return Some((result, ring.release(index)));
            }
            match &mut slot.waker {
                Some(waker) => waker.clone_from(cx.waker()),
                None => slot.waker = Some(cx.waker().clone()),
            }
            None
        });
        match done {
            Some(None) => Poll::Pending,
            Some(Some((result, payload))) => {
                self.index = None;
                let result = match usize::try_from(result) {
                    Ok(count) => Ok(count),
                    Err(_) => Err(io::Error::from_raw_os_error(-result)),
                };
                Poll::Ready((result, payload))
            }
            None => {
                self.index = None;
                Poll::Ready((Err(no_ring()), Payload::Nothing))
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        let Some(index) = self.index else { return };
        let payload = with_ring(|ring| {
            let slot = &mut ring.slots[index as usize];
            if let State::Done(_) = slot.state {
                return Some(ring.release(index));
            }
            slot.state = State::Orphaned;
            slot.waker = None;
            if self.cancel_on_drop {
                ring.cancel(index);
            }
            None
        });
        drop(payload);
    }
}

fn no_ring() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "files and sockets can be used on a reactor thread only")
}

/// Reads from `offset` into `buf[skip..]`. The number of bytes may be smaller than asked for; the buffer
/// comes back in any case. At most [`MAX_TRANSFER`] bytes.
pub async fn read(file: &RingFile, offset: u64, buf: DmaBuf, skip: usize) -> (io::Result<usize>, DmaBuf) {
    let target = file.target();
    let operation = Operation::start(Payload::Buf(buf), Some(file.clone()), |payload| {
        let Payload::Buf(buf) = payload else { unreachable!("a read owns a buffer") };
        let part = &mut buf[skip..];
        let len = part.len().min(MAX_TRANSFER) as u32;
        opcode::Read::new(target, part.as_mut_ptr(), len).offset(offset).build()
    });
    match operation {
        Ok(operation) => match operation.await {
            (result, Payload::Buf(buf)) => (result, buf),
            // The ring went while the operation was in flight, and took the buffer.
            (result, _) => (result, DmaBuf::uninit(0)),
        },
        Err(Payload::Buf(buf)) => (Err(no_ring()), buf),
        Err(_) => unreachable!("a read gives its buffer back"),
    }
}

/// Writes `data` at `offset`; may write fewer bytes. At most [`MAX_TRANSFER`] bytes.
pub async fn write(file: &RingFile, offset: u64, data: DmaSlice) -> io::Result<usize> {
    let target = file.target();
    let entry = |payload: &mut Payload| {
        let Payload::Slice(data) = payload else { unreachable!("a write owns a slice") };
        let len = data.len().min(MAX_TRANSFER) as u32;
        opcode::Write::new(target, data.as_ptr(), len).offset(offset).build()
    };
    run(Payload::Slice(data), file, entry).await
}

/// Writes the concatenation of `data` at `offset`; may write fewer bytes. At most 1024 parts.
pub async fn writev(file: &RingFile, offset: u64, data: Vec<DmaSlice>) -> io::Result<usize> {
    let target = file.target();
    let vectors = data
        .iter()
        .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() })
        .collect();
    let entry = |payload: &mut Payload| {
        let Payload::List(list) = payload else { unreachable!("a vectored write owns a list") };
        debug_assert_eq!(list.vectors.len(), list.slices.len());
        opcode::Writev::new(target, list.vectors.as_ptr(), list.vectors.len() as u32).offset(offset).build()
    };
    run(Payload::List(Box::new(List { slices: data, vectors })), file, entry).await
}

/// `fdatasync`: makes what was acknowledged before durable, with the metadata needed to read it back.
pub async fn fdatasync(file: &RingFile) -> io::Result<()> {
    let target = file.target();
    let entry = |_: &mut Payload| opcode::Fsync::new(target).flags(types::FsyncFlags::DATASYNC).build();
    run(Payload::Nothing, file, entry).await.map(drop)
}

/// `fallocate` with `mode` of FALLOC_FL_*.
pub async fn fallocate(file: &RingFile, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    let target = file.target();
    let entry = |_: &mut Payload| opcode::Fallocate::new(target, len).offset(offset).mode(mode).build();
    run(Payload::Nothing, file, entry).await.map(drop)
}

async fn run(
    payload: Payload,
    file: &RingFile,
    entry: impl FnOnce(&mut Payload) -> squeue::Entry,
) -> io::Result<usize> {
    match Operation::start(payload, Some(file.clone()), entry) {
        Ok(operation) => operation.await.0,
        Err(_) => Err(no_ring()),
    }
}

/// Parks the task until `fd` has something to read, was closed by the peer, or failed. The caller keeps
/// `fd` open until the future is done or dropped.
pub async fn readable(fd: impl AsRawFd) -> io::Result<()> {
    ready(fd.as_raw_fd(), libc::POLLIN | libc::POLLRDHUP).await
}

/// Parks the task until `fd` takes bytes, was closed by the peer, or failed. The caller keeps `fd` open
/// until the future is done or dropped.
pub async fn writable(fd: impl AsRawFd) -> io::Result<()> {
    ready(fd.as_raw_fd(), libc::POLLOUT).await
}

async fn ready(fd: RawFd, events: i16) -> io::Result<()> {
    let entry = |_: &mut Payload| opcode::PollAdd::new(types::Fd(fd), events as u32).build();
    match Operation::start(Payload::Nothing, None, entry) {
        Ok(mut operation) => {
            operation.cancel_on_drop = true;
            operation.await.0.map(drop)
        }
        Err(_) => Err(no_ring()),
    }
}
