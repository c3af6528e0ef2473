//! One queue on a reactor: the connection machine, its socket, and the task that moves bytes between them.
//!
//! ```text
//!   execute() ── submit ──► machine ◄── bytes ──► socket          a command's future sleeps until
//!       ▲                      │        (driver task)             the driver hands it its completion
//!       └───── completion ─────┘
//! ```
//!
//! The driver sends what all commands of one turn have queued in one vectored call and receives in large pieces. While
//! the queue is hot it looks at the socket every turn; when nothing has moved for the reactor's spin time it parks until
//! the socket or a new command wakes it.
//!
//! A command's future may be dropped at any time: the buffer stays with the machine until the controller is done with
//! it. Dropping the [`Queue`] closes the connection.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, getsockopt, socket, sockopt};
use slab::Slab;

use super::connection::{Granted, TRANSMIT_SLICES};
use super::{CommandQueue, Connection, ConnectionOptions, Controller, ControllerOptions, Data, HostError};
use crate::memory::{DmaBuf, DmaSlice};
use crate::nvme::base::{OPCODE_FABRICS, admin, nvm};
use crate::nvme::{Cqe, Sqe};
use crate::reactor::{self, sync};

/// A controller on a reactor.
pub type Initiator = Controller<Queue>;

/// TCP and ICReq/ICResp must be through within this time.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// How often one turn of the driver receives before it lets other tasks run.
const RECEIVES_PER_TURN: usize = 4;

/// Connects and enables a controller within `limit`, connects its I/O queues, and keeps it alive if `options` has a
/// Keep Alive Timeout. A command that is not answered in the time that `options` gives it ends the association. On a reactor
/// thread.
pub async fn connect(
    addr: SocketAddr,
    subnqn: &str,
    options: &ControllerOptions,
    limit: Duration,
) -> Result<Initiator, HostError> {
    let deadline = reactor::now() + limit;
    let connected = reactor::with_deadline(deadline, Controller::connect(addr, subnqn, options)).await;
    let controller = connected.ok_or(HostError::Timeout { ms: limit.as_millis() as u64 })??;
    if options.kato_ms > 0 {
        spawn_keep_alive(controller.admin(), options.kato_ms);
    }
    if options.command_timeout_ms > 0 {
        let limit = Duration::from_millis(options.command_timeout_ms.into());
        watch(controller.admin(), controller.io_queues(), limit);
    }
    Ok(controller)
}

/// Sends Keep Alive at half of the timeout (Base 2.0, 3.9) for as long as the admin queue lives. A controller that does
/// not answer one in the whole of the timeout is gone: its connection ends, and with it every command.
fn spawn_keep_alive(admin: &Rc<Queue>, kato_ms: u32) {
    let weak = Rc::downgrade(admin);
    let limit = Duration::from_millis(u64::from(kato_ms).max(1));
    reactor::spawn(async move {
        loop {
            reactor::sleep(limit / 2).await;
            // The queue is not held while the answer is under way, so that its owner can drop it.
            let Some(shared) = weak.upgrade().map(|admin| Rc::clone(&admin.shared)) else { return };
            let ping = run(&shared, Sqe::new(admin::KEEP_ALIVE, 0), Data::None);
            match reactor::with_deadline(reactor::now() + limit, ping).await {
                Some((Ok(cqe), _)) if cqe.status().is_success() => {}
                Some((Ok(cqe), _)) => tracing::debug!(status = %cqe.status(), "keep alive was refused"),
                Some((Err(error), _)) => return tracing::debug!(%error, "keep alive ends"),
                None => {
                    tracing::warn!(ms = limit.as_millis(), "the controller does not answer; connection ends");
                    return shared.end(HostError::Closed);
                }
            }
        }
    });
}

/// Ends all queues of an association when one of their commands is not answered within `limit`, or an eighth of it later.
fn watch(admin: &Rc<Queue>, io: &[Queue], limit: Duration) {
    let io = io.iter().map(|queue| (false, Rc::downgrade(&queue.shared)));
    let queues: Vec<(bool, Weak<Shared>)> =
        std::iter::once((true, Rc::downgrade(&admin.shared))).chain(io).collect();
    reactor::spawn(async move {
        loop {
            reactor::sleep(limit / 8).await;
            let alive = || queues.iter().filter_map(|(is_admin, queue)| Some((*is_admin, queue.upgrade()?)));
            if alive().next().is_none() {
                return;
            }
            let Some(error) = alive().find_map(|(is_admin, queue)| queue.overdue(is_admin, limit)) else {
                continue;
            };
            tracing::warn!(%error);
            return alive().for_each(|(_, queue)| queue.end(error.clone()));
        }
    });
}

/// A command in flight, as a message names it.
#[derive(Clone, Copy)]
struct Started {
    opcode: u8,
    nsid: u32,
    at: Instant,
}

impl Started {
    fn name(self, is_admin: bool) -> &'static str {
        match (self.opcode, is_admin) {
            (OPCODE_FABRICS, _) => "a Fabrics command",
            (admin::IDENTIFY, true) => "Identify",
            (admin::GET_LOG_PAGE, true) => "Get Log Page",
            (admin::GET_FEATURES, true) => "Get Features",
            (admin::SET_FEATURES, true) => "Set Features",
            (admin::KEEP_ALIVE, true) => "Keep Alive",
            (admin::ABORT, true) => "Abort",
            (_, true) => "an admin command",
            (nvm::READ, false) => "Read",
            (nvm::WRITE, false) => "Write",
            (nvm::FLUSH, false) => "Flush",
            (nvm::COMPARE, false) => "Compare",
            (nvm::VERIFY, false) => "Verify",
            (nvm::COPY, false) => "Copy",
            (nvm::WRITE_ZEROES, false) => "Write Zeroes",
            (nvm::DATASET_MANAGEMENT, false) => "Dataset Management",
            (_, false) => "an I/O command",
        }
    }
}

/// One connection with its commands in flight.
pub struct Queue {
    shared: Rc<Shared>,
}

type Machine = Connection<DmaBuf, DmaSlice>;
type Buffer = Data<DmaBuf, DmaSlice>;
type Outcome = (Result<Cqe, HostError>, Buffer);

struct Shared {
    state: RefCell<State>,
    /// One permit per command slot.
    slots: sync::Semaphore,
    /// Wakes the driver when it is parked.
    kick: sync::Event,
    parked: Cell<bool>,
    /// Why the driver is to end the connection.
    ending: RefCell<Option<HostError>>,
}

impl Shared {
    /// Ends the connection, and every command with this error.
    fn end(&self, error: HostError) {
        self.ending.borrow_mut().get_or_insert(error);
        self.kick.notify();
    }

    /// What to say of a command that has been in flight for longer than `limit`. Event requests may be for ever.
    fn overdue(&self, is_admin: bool, limit: Duration) -> Option<HostError> {
        let now = reactor::now();
        let state = self.state.borrow();
        let waits = |started: &&Started| is_admin && started.opcode == admin::ASYNC_EVENT_REQUEST;
        let mut late = state.started.iter().flatten().filter(|started| !waits(started));
        let started = late.find(|started| now.saturating_duration_since(started.at) >= limit)?;
        Some(HostError::CommandTimeout {
            command: started.name(is_admin),
            opcode: started.opcode,
            nsid: started.nsid,
            ms: limit.as_millis() as u64,
        })
    }
}

struct State {
    machine: Machine,
    socket: TcpStream,
    /// By the token that the machine knows the command under.
    waiters: Slab<Waiter>,
    /// By the same token, while the command is in flight.
    started: Vec<Option<Started>>,
    lost: Option<HostError>,
    /// Command slots that became free since the driver last gave their permits back.
    freed: usize,
}

enum Waiter {
    Waiting(Option<Waker>),
    Done(Outcome),
    /// The future was dropped.
    Abandoned,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Bytes moved; look again soon.
    Some,
    /// Nothing to do; the flag says that bytes wait for room in the socket.
    None { blocked: bool },
}

impl State {
    /// Sends and receives what can be without waiting.
    fn turn(&mut self) -> Result<Progress, HostError> {
        let (mut moved, mut blocked) = self.send()?;
        for _ in 0..RECEIVES_PER_TURN {
            let (received, more) = self.receive()?;
            moved |= received;
            if !more {
                break;
            }
        }
        if moved && self.machine.has_transmit() && !blocked {
            (_, blocked) = self.send()?;
        }
        Ok(if moved { Progress::Some } else { Progress::None { blocked } })
    }

    /// Whether bytes were sent, and whether the socket is full.
    fn send(&mut self) -> Result<(bool, bool), HostError> {
        let mut sent = false;
        while self.machine.has_transmit() {
            let mut slices = [IoSlice::new(&[]); TRANSMIT_SLICES];
            let used = self.machine.transmit_slices(&mut slices);
            match self.socket.write_vectored(&slices[..used]) {
                Ok(0) => return Err(HostError::Closed),
                Ok(n) => {
                    self.machine.on_transmitted(n);
                    sent = true;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok((sent, true)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok((sent, false))
    }

    /// Whether bytes were received, and whether there may be more.
    fn receive(&mut self) -> Result<(bool, bool), HostError> {
        let (outcome, room) = {
            let mut slices = self.machine.receive_slices();
            let room = slices[0].len() + slices[1].len();
            (self.socket.read_vectored(&mut slices), room)
        };
        match outcome {
            Ok(0) => Err(HostError::Closed),
            Ok(n) => {
                let judged = self.machine.on_received(n);
                self.hand_out();
                judged?;
                Ok((true, n == room))
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok((false, true)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok((false, false)),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives completions to the futures that wait for them.
    fn hand_out(&mut self) {
        while let Some(done) = self.machine.poll_completion() {
            self.finish(done.token as usize, (Ok(done.cqe), done.data));
        }
    }

    fn finish(&mut self, token: usize, outcome: Outcome) {
        self.freed += 1;
        if let Some(started) = self.started.get_mut(token) {
            *started = None;
        }
        match self.waiters.get_mut(token) {
            Some(waiter @ Waiter::Waiting(_)) => {
                if let Waiter::Waiting(Some(waker)) = std::mem::replace(waiter, Waiter::Done(outcome)) {
                    waker.wake();
                }
            }
            Some(Waiter::Abandoned) => drop(self.waiters.remove(token)),
            Some(Waiter::Done(_)) | None => {}
        }
    }

    /// The connection is gone: everything in flight ends with `error`.
    fn lose(&mut self, error: HostError) {
        // A termination request may wait; whether it still gets through does not matter.
        let _ = self.send();
        self.hand_out();
        for (token, data) in self.machine.take_in_flight() {
            self.finish(token as usize, (Err(error.clone()), data));
        }
        self.lost.get_or_insert(error);
    }
}

impl Queue {
    /// Connects, exchanges ICReq and ICResp and starts the driver. On a reactor thread.
    pub async fn open(addr: SocketAddr, options: ConnectionOptions) -> Result<Queue, HostError> {
        let deadline = reactor::now() + OPEN_LIMIT;
        let timeout = HostError::Timeout { ms: OPEN_LIMIT.as_millis() as u64 };
        reactor::with_deadline(deadline, Queue::open_unlimited(addr, options)).await.unwrap_or(Err(timeout))
    }

    async fn open_unlimited(addr: SocketAddr, options: ConnectionOptions) -> Result<Queue, HostError> {
        let socket = connect_socket(addr)
            .await
            .map_err(|source| HostError::Connect { addr, source: Arc::new(source) })?;
        let machine = Connection::new(options);
        let depth = machine.free_slots();
        let mut state = State {
            machine,
            socket,
            waiters: Slab::with_capacity(depth),
            started: Vec::with_capacity(depth),
            lost: None,
            freed: 0,
        };
        while !state.machine.is_open() {
            match state.turn()? {
                Progress::Some => {}
                Progress::None { blocked: true } => reactor::writable(state.socket.as_raw_fd()).await?,
                Progress::None { blocked: false } => reactor::readable(state.socket.as_raw_fd()).await?,
            }
        }
        let shared = Rc::new(Shared {
            state: RefCell::new(state),
            slots: sync::Semaphore::new(depth),
            kick: sync::Event::new(),
            parked: Cell::new(false),
            ending: RefCell::new(None),
        });
        reactor::spawn(drive(Rc::clone(&shared)));
        Ok(Queue { shared })
    }

    /// What the controller granted in ICResp.
    pub fn granted(&self) -> Option<Granted> {
        self.shared.state.borrow().machine.granted()
    }

    /// Commands in flight.
    pub fn in_flight(&self) -> usize {
        self.shared.state.borrow().machine.in_flight()
    }
}

/// Submits a command and waits for its end.
async fn run(shared: &Shared, sqe: Sqe, data: Buffer) -> Outcome {
    shared.slots.acquire(1).await.forget();
    let waiter = {
        let mut state = shared.state.borrow_mut();
        if let Some(error) = &state.lost {
            let error = error.clone();
            shared.slots.release(1);
            return (Err(error), data);
        }
        let token = state.waiters.insert(Waiter::Waiting(None));
        if let Err(refused) = state.machine.submit(sqe, data, token as u64) {
            state.waiters.remove(token);
            shared.slots.release(1);
            return (Err(refused.why.into()), refused.data);
        }
        if state.started.len() <= token {
            state.started.resize(token + 1, None);
        }
        state.started[token] = Some(Started { opcode: sqe.opcode, nsid: sqe.nsid.get(), at: reactor::now() });
        WaitFor { shared, token: Some(token) }
    };
    if shared.parked.get() {
        shared.kick.notify();
    }
    waiter.done().await
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.end(HostError::Closed);
    }
}

/// The wait for one command; dropping it leaves the command to itself.
struct WaitFor<'a> {
    shared: &'a Shared,
    token: Option<usize>,
}

impl WaitFor<'_> {
    async fn done(mut self) -> Outcome {
        poll_fn(|cx| {
            let Some(token) = self.token else { return Poll::Pending };
            let mut state = self.shared.state.borrow_mut();
            if let Some(Waiter::Waiting(waker)) = state.waiters.get_mut(token) {
                if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    *waker = Some(cx.waker().clone());
                }
                return Poll::Pending;
            }
            self.token = None;
            match state.waiters.try_remove(token) {
                Some(Waiter::Done(outcome)) => Poll::Ready(outcome),
                _ => Poll::Ready((Err(HostError::Closed), Data::None)),
            }
        })
        .await
    }
}

impl Drop for WaitFor<'_> {
    fn drop(&mut self) {
        let Some(token) = self.token else { return };
        let mut state = self.shared.state.borrow_mut();
        match state.waiters.get_mut(token) {
            Some(Waiter::Done(_)) => drop(state.waiters.remove(token)),
            Some(waiter) => *waiter = Waiter::Abandoned,
            None => {}
        }
    }
}

/// The task that moves bytes, until the queue is dropped or the connection is lost.
async fn drive(shared: Rc<Shared>) {
    let mut idle_since = None;
    loop {
        let ending = shared.ending.borrow().clone();
        let outcome = match ending {
            Some(error) => Err(error),
            None => shared.state.borrow_mut().turn(),
        };
        if let Err(error) = &outcome {
            shared.state.borrow_mut().lose(error.clone());
        }
        let freed = std::mem::take(&mut shared.state.borrow_mut().freed);
        if freed > 0 {
            shared.slots.release(freed);
        }
        match outcome {
            Err(_) => return,
            Ok(Progress::Some) => {
                idle_since = None;
                reactor::yield_now().await;
            }
            Ok(Progress::None { blocked }) => {
                let since = *idle_since.get_or_insert_with(reactor::now);
                if reactor::now() - since < reactor::spin() {
                    reactor::yield_idle().await;
                } else {
                    park(&shared, blocked).await;
                    idle_since = None;
                }
            }
        }
    }
}

/// Sleeps until a command is submitted, the queue is dropped, or the socket has bytes (or, if `blocked`, room).
async fn park(shared: &Shared, blocked: bool) {
    let fd = shared.state.borrow().socket.as_raw_fd();
    let mut kicked = pin!(shared.kick.wait());
    let mut readable = pin!(reactor::readable(fd));
    let mut writable =
        pin!(async move { if blocked { reactor::writable(fd).await } else { std::future::pending().await } });
    shared.parked.set(true);
    // An error of the poll itself ends the sleep too: the next turn meets it at the socket.
    poll_fn(|cx| {
        let woken = kicked.as_mut().poll(cx).is_ready()
            || readable.as_mut().poll(cx).is_ready()
            || writable.as_mut().poll(cx).is_ready();
        if woken { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    shared.parked.set(false);
}

async fn connect_socket(addr: SocketAddr) -> std::io::Result<TcpStream> {
    let family = if addr.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let fd: OwnedFd = socket(family, SockType::Stream, flags, None)?;
    match nix::sys::socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(addr)) {
        Ok(()) => {}
        Err(nix::errno::Errno::EINPROGRESS) => {
            reactor::writable(fd.as_raw_fd()).await?;
            match getsockopt(&fd, sockopt::SocketError)? {
                0 => {}
                errno => return Err(std::io::Error::from_raw_os_error(errno)),
            }
        }
        Err(errno) => return Err(errno.into()),
    }
    let socket = TcpStream::from(fd);
    socket.set_nodelay(true)?;
    Ok(socket)
}

impl CommandQueue for Queue {
    type In = DmaBuf;
    type Out = DmaSlice;

    fn open(addr: SocketAddr, options: ConnectionOptions) -> impl Future<Output = Result<Queue, HostError>> {
        Queue::open(addr, options)
    }

    fn execute(&self, sqe: Sqe, data: Buffer) -> impl Future<Output = Outcome> {
        run(&self.shared, sqe, data)
    }

    fn set_in_capsule_bytes(&self, bytes: u32) {
        self.shared.state.borrow_mut().machine.set_in_capsule_bytes(bytes);
    }

    fn in_buffer(len: usize) -> DmaBuf {
        DmaBuf::zeroed(len)
    }

    fn out_buffer(content: &[u8]) -> DmaSlice {
        DmaSlice::copy_of(content)
    }

    fn pause(time: Duration) -> impl Future<Output = ()> {
        reactor::sleep(time)
    }
}

#[cfg(test)]
mod tests;
