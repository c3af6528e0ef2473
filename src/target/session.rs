//! The task of one connection: moves bytes between the socket and the [`Queue`], and runs its jobs.
//!
//! One turn: one receive, everything in it handled, jobs polled, one vectored send of all answers. While there is traffic the
//! socket is polled without asking the kernel to be woken; after a moment without any the task parks until the socket, a
//! job, a message or a timer wakes it.
//!
//! ```text
//!   recv ─▶ receive buffer of the reactor ─▶ Queue ─▶ jobs ─▶ Queue ─▶ answers ─▶ writev
//!       └─▶ buffer of a large write ──────────┘
//! ```
//!
//! The receive buffer is one per reactor, taken for a turn: an idle connection owns no buffer at all. What is left of a PDU
//! that has not arrived whole is kept aside until the next turn; it is less than one PDU, unless the host has more commands
//! outstanding than its queue holds.
//!
//! At the end the socket is closed first, so that the host learns of it at once; running jobs are then waited for, however
//! long their device takes, and only when the last is gone does the queue leave its controller. So a controller that says
//! that it is reset, and a namespace that is said to be removed, are written to by nobody any more.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use tracing::{debug, trace, warn};

use super::inbox::{CloseReason, Inbox};
use super::job::{self, Done, Job};
use super::listener::Listener;
use super::queue::{Ending, Endpoint, Queue};
use super::service::Shared;
use crate::memory::{DmaBuf, DmaSlice};
use crate::reactor::{self, FuturePool};

/// Size of a reactor's receive buffer: what one turn of a connection handles at most.
const CHUNK_BYTES: usize = 256 * 1024;
/// What is received behind the payload of a large write, or instead of it when its header is still to come: the next header
/// and little more, so that nearly all of a payload goes straight to its buffer.
const PEEK_BYTES: usize = 4096;
/// Pieces of one vectored send.
const SEND_PIECES: usize = 256;
/// Vectored sends of one turn.
const SENDS_PER_TURN: usize = 4;
/// Socket buffers, bytes; enough for what one turn handles, in both directions.
const SOCKET_BUFFER_BYTES: usize = 2 << 20;
/// A host that does not answer TCP is probed after this long, seconds, so often, and so many times.
const PEER_IDLE_S: u32 = 30;
const PEER_PROBE_S: u32 = 10;
const PEER_PROBES: u32 = 3;
/// Commands that run on for so long after their connection was closed are worth a word.
const DRAIN_REMARK: Duration = Duration::from_secs(10);
/// A host whose connection we end has this long to read why.
const FAREWELL_LIMIT: Duration = Duration::from_secs(2);

thread_local! {
    /// The receive buffer of this reactor, while no connection uses it.
    static CHUNK: RefCell<Option<DmaBuf>> = const { RefCell::new(None) };
}

/// Serves a connection until it ends, on the reactor that this runs on.
pub(super) async fn serve(shared: Arc<Shared>, listener: Arc<Listener>, stream: TcpStream, peer: SocketAddr) {
    if let Err(error) = open(&shared, &listener, stream, peer).await {
        debug!(%peer, %error, "connection could not be set up");
    }
    shared.connection_closed();
}

async fn open(
    shared: &Arc<Shared>,
    listener: &Arc<Listener>,
    stream: TcpStream,
    peer: SocketAddr,
) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    watch_peer(&stream)?;
    let endpoint = Endpoint {
        options: shared.options(),
        shared: Arc::clone(shared),
        listener: listener.addr,
        local: stream.local_addr()?,
        peer,
        reactor: reactor::current().map_or(0, |reactor| reactor.id().0),
        inbox: Arc::new(Inbox::default()),
    };
    let mut session = Session {
        inbox: Arc::clone(&endpoint.inbox),
        queue: Queue::new(endpoint, reactor::now()),
        stream,
        stash: Vec::new(),
        pool: FuturePool::new(0),
        start: job::run,
        is_enlarged: false,
    };
    session.run().await;
    session.close().await;
    Ok(())
}

/// Makes the kernel find out that a host is gone which says nothing because it is: a crash, or a cable.
fn watch_peer(stream: &TcpStream) -> io::Result<()> {
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &PEER_IDLE_S)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &PEER_PROBE_S)?;
    setsockopt(stream, sockopt::TcpKeepCount, &PEER_PROBES)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &(1000 * (PEER_IDLE_S + PEER_PROBE_S * PEER_PROBES)))?;
    Ok(())
}

/// Gives the socket buffers for what one turn handles. Without the privilege to go beyond the system's limit its own tuning
/// is left alone, for that goes further than the limit.
fn enlarge_buffers(stream: &TcpStream) {
    let receive = setsockopt(stream, sockopt::RcvBufForce, &SOCKET_BUFFER_BYTES);
    let send = setsockopt(stream, sockopt::SndBufForce, &SOCKET_BUFFER_BYTES);
    if let Err(error) = receive.and(send) {
        trace!(%error, "socket buffers are left to the system");
    }
}

struct Session<F: Future<Output = Done>> {
    inbox: Arc<Inbox>,
    queue: Queue,
    stream: TcpStream,
    /// Received, but not handled yet.
    stash: Vec<u8>,
    pool: FuturePool<F>,
    start: fn(Job) -> F,
    /// The socket has the buffers of an I/O queue.
    is_enlarged: bool,
}

impl<F: Future<Output = Done>> Session<F> {
    async fn run(&mut self) {
        let mut last_work = reactor::now();
        loop {
            let now = reactor::now();
            let mut worked = poll_fn(|cx| Poll::Ready(self.turn(now, cx))).await;
            worked |= self.send();
            self.queue.account();
            if self.queue.ending() != Ending::Open {
                return;
            }
            if !self.is_enlarged && self.queue.qid().is_some_and(|qid| qid > 0) {
                self.is_enlarged = true;
                enlarge_buffers(&self.stream);
            }
            if worked {
                last_work = now;
                reactor::yield_now().await;
            } else if now.saturating_duration_since(last_work) < reactor::spin() {
                reactor::yield_idle().await;
            } else {
                self.park().await;
                last_work = reactor::now();
            }
        }
    }

    /// Receives, handles what came, and polls the jobs. True if there was anything.
    fn turn(&mut self, now: Instant, cx: &mut Context<'_>) -> bool {
        self.queue.turn(now);
        let (chunk, mut worked) = self.receive(now);
        worked |= self.run_jobs(cx);
        self.queue.judge(now);
        // Jobs that read from the receive buffer have ended, so it can be used again; else it is theirs.
        if let Some(chunk) = chunk
            && let Ok(buf) = chunk.try_into_buf()
        {
            CHUNK.set(Some(buf));
        }
        worked
    }

    fn receive(&mut self, now: Instant) -> (Option<DmaSlice>, bool) {
        // More input is of no use while what is at hand cannot be handled.
        if !self.stash.is_empty() && !self.queue.has_room(&self.stash, now) {
            return (None, false);
        }
        let mut chunk = CHUNK.take().unwrap_or_else(|| DmaBuf::uninit(CHUNK_BYTES));
        let kept = self.stash.len();
        chunk[..kept].copy_from_slice(&self.stash);
        let limit = match self.queue.conn.transfers_waiting() {
            0 => CHUNK_BYTES - kept,
            _ => PEEK_BYTES.min(CHUNK_BYTES - kept),
        };
        let (direct, behind) = match self.read(&mut chunk[kept..kept + limit]) {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => (0, 0),
            Err(error) => {
                debug!(peer = %self.queue.endpoint().peer, %error, "connection ended");
                self.queue.end(Ending::Now);
                return (Some(chunk.freeze()), true);
            }
        };
        if direct > 0 {
            self.queue.payload_received(direct, now);
        }
        let filled = kept + behind;
        let chunk = chunk.freeze();
        // What is stashed is looked at again even if nothing came: there is room for it now.
        if filled == 0 {
            return (Some(chunk), direct > 0);
        }
        let input = chunk.slice(0..filled);
        let done = self.queue.receive(&input, 0, now);
        self.stash.clear();
        self.stash.extend_from_slice(&input[done..]);
        (Some(chunk), direct > 0 || behind > 0 || done > 0)
    }

    /// Reads once: into the payload of a large write that is under way, and behind it into `buf`. The lengths of both.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<(usize, usize)> {
        let mut stream = &self.stream;
        let (len, direct) = match self.queue.conn.payload_room() {
            Some(room) => {
                let direct = room.len();
                (stream.read_vectored(&mut [IoSliceMut::new(room), IoSliceMut::new(buf)])?, direct)
            }
            None if buf.is_empty() => return Ok((0, 0)),
            None => (stream.read(buf)?, 0),
        };
        if len == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok((len.min(direct), len.saturating_sub(direct)))
    }

    /// Starts what the queue wants done and collects what is done. True if anything was.
    fn run_jobs(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(jobs) = self.queue.jobs() {
            for job in jobs.drain(..) {
                self.pool.start((self.start)(job));
            }
        }
        let mut worked = false;
        while let Some((_, done)) = self.pool.poll_ready(cx) {
            self.queue.on_done(done);
            worked = true;
        }
        worked
    }

    /// Sends what is queued, as far as the socket takes it. True if it took anything.
    fn send(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..SENDS_PER_TURN {
            let transmit = self.queue.conn.transmit();
            if transmit.is_empty() {
                break;
            }
            let mut pieces = [IoSlice::new(&[]); SEND_PIECES];
            let used = transmit.gather(&mut pieces);
            let offered: usize = pieces[..used].iter().map(|piece| piece.len()).sum();
            match (&self.stream).write_vectored(&pieces[..used]) {
                Ok(sent) => {
                    self.queue.conn.transmit().advance(sent);
                    worked |= sent > 0;
                    if sent < offered {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    debug!(peer = %self.queue.endpoint().peer, %error, "connection ended");
                    self.queue.end(Ending::Now);
                    break;
                }
            }
        }
        worked
    }

    /// Waits until there is something to do.
    async fn park(&mut self) {
        // With input at hand that cannot be handled yet, more of it is of no use: the end of a job is what helps.
        let mut readable = pin!(match self.queue.is_blocked() {
            false => Some(reactor::readable(self.stream.as_raw_fd())),
            true => None,
        });
        let mut writable = pin!(match self.queue.conn.transmit().is_empty() {
            false => Some(reactor::writable(self.stream.as_raw_fd())),
            true => None,
        });
        let mut timer = pin!(self.queue.deadline().map(reactor::sleep_until));
        poll_fn(|cx| {
            if !self.inbox.park(cx.waker()) {
                return Poll::Ready(());
            }
            if let Some((_, done)) = self.pool.poll_ready(cx) {
                self.queue.on_done(done);
                return Poll::Ready(());
            }
            // What an error of the socket means is found out by using it.
            let mut ready = is_ready(readable.as_mut().as_pin_mut(), cx);
            ready |= is_ready(writable.as_mut().as_pin_mut(), cx);
            ready |= is_ready(timer.as_mut().as_pin_mut(), cx);
            if ready { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    // ---- the end ---------------------------------------------------------------------------------------------------

    async fn close(&mut self) {
        let controller = self.queue.controller().cloned();
        let qid = self.queue.qid();
        if let (Some(controller), Some(0)) = (&controller, qid) {
            controller.close_all(CloseReason::ControllerGone);
        }
        // The host sees the end now, whatever is still running.
        match self.queue.ending() {
            Ending::AfterSending => {
                self.finish_sending();
            }
            Ending::Open | Ending::Now => drop(self.stream.shutdown(Shutdown::Both)),
        }
        self.queue.decline_all();
        self.drain().await;
        self.queue.account();
        match (&controller, qid) {
            (Some(controller), Some(0)) => {
                self.await_io_queues(controller).await;
                controller.subsystem.forget_controller(controller.cntlid);
                debug!(cntlid = controller.cntlid, "controller is gone");
            }
            (Some(controller), Some(qid)) => {
                controller.left(qid);
                // From here on nobody posts; what came before is answered.
                self.queue.decline_all();
            }
            _ => {}
        }
        if self.queue.ending() == Ending::AfterSending {
            self.say_farewell().await;
        }
    }

    /// Sends what the socket takes; once that is all, says that nothing more will come.
    fn finish_sending(&mut self) -> bool {
        self.send();
        let finished = self.queue.conn.transmit().is_empty();
        if finished {
            // It fails when the host has closed first.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        finished
    }

    /// Lets the host read what was sent: closing a socket with unread input would destroy it.
    async fn say_farewell(&mut self) {
        let deadline = reactor::now() + FAREWELL_LIMIT;
        while !self.finish_sending() {
            let writable = reactor::writable(self.stream.as_raw_fd());
            if reactor::with_deadline(deadline, writable).await.is_none() {
                return;
            }
        }
        let mut unread = vec![0; PEEK_BYTES];
        loop {
            match (&self.stream).read(&mut unread) {
                Ok(0) => return,
                Ok(_) if reactor::now() >= deadline => return,
                Ok(_) => reactor::yield_now().await,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let readable = reactor::readable(self.stream.as_raw_fd());
                    if reactor::with_deadline(deadline, readable).await.is_none() {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Waits for the jobs that are running.
    async fn drain(&mut self) {
        let mut is_late = false;
        loop {
            let all_done = poll_fn(|cx| {
                while let Some((_, done)) = self.pool.poll_ready(cx) {
                    self.queue.on_done(done);
                }
                if self.pool.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            });
            if reactor::with_deadline(reactor::now() + DRAIN_REMARK, all_done).await.is_some() {
                return;
            }
            if !is_late {
                warn!(
                    peer = %self.queue.endpoint().peer,
                    commands = self.pool.len(),
                    "commands still run although their connection is closed; their devices hold them"
                );
            }
            is_late = true;
        }
    }

    /// Waits until the controller's I/O queues have left it.
    async fn await_io_queues(&mut self, controller: &super::controller::Controller) {
        while controller.io_queue_count() > 0 {
            let inbox = &self.inbox;
            poll_fn(|cx| if inbox.park(cx.waker()) { Poll::Pending } else { Poll::Ready(()) }).await;
            self.queue.decline_all();
        }
    }
}

fn is_ready<F: Future>(future: Option<std::pin::Pin<&mut F>>, cx: &mut Context<'_>) -> bool {
    future.is_some_and(|future| future.poll(cx).is_ready())
}
