//! A listening socket: accepts connections on the first reactor and deals them over all.
//!
//! Several subsystems may listen on one address; the socket is shared and lives as long as one of them does. Which of them
//! a host may use is decided by its Connect.
#![forbid(unsafe_code)]

use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::error::TargetError;
use super::inbox::Inbox;
use super::service::Shared;
use super::session;
use crate::reactor;

/// Connections accepted before other tasks have their turn.
const ACCEPT_BATCH: usize = 16;
/// How long to leave a socket alone that cannot accept: no file descriptors, as a rule.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

pub struct Listener {
    /// As configured: it may be a wildcard.
    pub addr: SocketAddr,
    inbox: Inbox,
    stop: AtomicBool,
    stopped: AtomicBool,
}

/// How long an address may stay taken by a process that was killed: the kernel ends its operations, and with them
/// its sockets, in its own time.
const AFTERLIFE: Duration = Duration::from_millis(500);
const AFTERLIFE_POLL: Duration = Duration::from_millis(2);

impl Listener {
    /// Binds `addr`, waiting for a dead process to let go of it. `None` if `is_open` by then.
    pub(super) async fn bind(
        addr: SocketAddr,
        shared: &Arc<Shared>,
        is_open: impl Fn() -> bool,
    ) -> Result<Option<TcpListener>, TargetError> {
        let reactor = shared.reactors.first().ok_or(TargetError::NoReactor)?;
        let started = Instant::now();
        loop {
            if is_open() {
                return Ok(None);
            }
            match TcpListener::bind(addr) {
                Ok(socket) => return Ok(Some(socket)),
                // Slept on a reactor, so that the caller may run on any executor.
                Err(source) => {
                    if source.kind() != io::ErrorKind::AddrInUse
                        || started.elapsed() >= AFTERLIFE
                        || reactor.call(|| reactor::sleep(AFTERLIFE_POLL)).await.is_err()
                    {
                        return Err(TargetError::Listen { addr, source });
                    }
                }
            }
        }
    }

    /// Starts to accept.
    pub(super) fn open(
        addr: SocketAddr,
        socket: TcpListener,
        shared: &Arc<Shared>,
    ) -> Result<Arc<Listener>, TargetError> {
        let reactor = shared.reactors.first().ok_or(TargetError::NoReactor)?;
        socket.set_nonblocking(true).map_err(|source| TargetError::Listen { addr, source })?;
        let listener = Arc::new(Listener {
            addr,
            inbox: Inbox::default(),
            stop: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        });
        let (this, shared) = (Arc::clone(&listener), Arc::clone(shared));
        reactor.spawn(move || accept_all(this, socket, shared));
        Ok(listener)
    }

    /// Stops accepting; when this returns the address is free.
    pub(super) async fn close(&self, shared: &Arc<Shared>) {
        self.stop.store(true, Ordering::Release);
        self.inbox.nudge();
        let Some(reactor) = shared.reactors.first() else { return };
        while !self.stopped.load(Ordering::Acquire) {
            if reactor.call(|| reactor::sleep(Duration::from_micros(200))).await.is_err() {
                return;
            }
        }
    }
}

async fn accept_all(listener: Arc<Listener>, socket: TcpListener, shared: Arc<Shared>) {
    while !listener.stop.load(Ordering::Acquire) {
        let mut accepted = 0;
        let outcome = loop {
            if accepted == ACCEPT_BATCH {
                break Ok(());
            }
            match socket.accept() {
                Ok((stream, peer)) => deal(&listener, &shared, stream, peer),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break wait(&listener, &socket).await,
                // The host gave up before we got to it.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) => break Err(e),
            }
            accepted += 1;
        };
        if let Err(error) = outcome {
            if shared.complaints.may_speak(Instant::now()) {
                warn!(addr = %listener.addr, %error, "cannot accept connections for now");
            }
            reactor::sleep(ACCEPT_RETRY).await;
        } else if accepted > 0 {
            reactor::yield_now().await;
        }
    }
    drop(socket);
    listener.stopped.store(true, Ordering::Release);
}

/// Waits for a connection or for [`Listener::close`].
async fn wait(listener: &Listener, socket: &TcpListener) -> io::Result<()> {
    let mut readable = pin!(reactor::readable(socket.as_raw_fd()));
    poll_fn(|cx| {
        if !listener.inbox.park(cx.waker()) {
            listener.inbox.take(&mut Vec::new());
            return Poll::Ready(Ok(()));
        }
        readable.as_mut().poll(cx)
    })
    .await
}

fn deal(listener: &Arc<Listener>, shared: &Arc<Shared>, stream: TcpStream, peer: SocketAddr) {
    if !shared.connection_opened() {
        if shared.complaints.may_speak(Instant::now()) {
            warn!(%peer, "connection refused: there are as many as max_connections allows");
        }
        return;
    }
    debug!(%peer, listener = %listener.addr, "connection accepted");
    let (listener, shared) = (Arc::clone(listener), Arc::clone(shared));
    let reactor = shared.next_reactor().clone();
    reactor.spawn(move || session::serve(shared, listener, stream, peer));
}
