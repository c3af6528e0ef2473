//! The initiator on a blocking socket: for integration tests and small tools, with no reactor.
//!
//! [`Queue`] runs the same machine as the real initiator; [`connect`] gives a [`Controller`] over it whose methods are
//! futures that are always ready: [`now`] runs them. [`raw::RawConnection`] sends and reads single PDUs, right or wrong.
//!
//! ```no_run
//! use rimrock::host::{ControllerOptions, blocking};
//!
//! let options = ControllerOptions::new(uuid::Uuid::new_v4());
//! let ctrl = blocking::connect("127.0.0.1:4420".parse()?, "nqn.2016-06.io.spdk:cnode1", &options)?;
//! let ns = blocking::now(ctrl.namespace(1))?;
//! blocking::now(ctrl.write(&ns, 0, vec![7; 4096], false))?;
//! let (result, data) = blocking::now(ctrl.read(&ns, 0, vec![0; 4096]));
//! # result?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod raw;

use std::cell::{Ref, RefCell};
use std::collections::HashMap;
use std::future::{Future, ready};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::connection::{Granted, TRANSMIT_SLICES};
use super::{
    CommandQueue, Completion, Connection, ConnectionOptions, Controller, ControllerOptions, Data, HostError,
};
use crate::nvme::{Cqe, Sqe};

pub use raw::{Pdu, RawAssociation, RawConnection};

/// How long a blocking queue waits for the peer before it gives up, unless [`Queue::set_timeout`] says otherwise.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// A controller over blocking queues.
pub type BlockingController = Controller<Queue>;

/// Connects and enables a controller, and connects its I/O queues.
pub fn connect(
    addr: SocketAddr,
    subnqn: &str,
    options: &ControllerOptions,
) -> Result<BlockingController, HostError> {
    now(Controller::connect(addr, subnqn, options))
}

/// The same without I/O queues.
pub fn connect_admin(
    addr: SocketAddr,
    subnqn: &str,
    options: &ControllerOptions,
) -> Result<BlockingController, HostError> {
    now(Controller::connect_admin(addr, subnqn, options))
}

/// Runs a future that waits for nothing but blocking queues.
///
/// # Panics
/// When the future waits for something else: it would never be woken.
pub fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a future over blocking queues waited for something else"),
    }
}

/// The machine of a blocking queue.
pub type Machine = Connection<Vec<u8>, Vec<u8>>;
/// A command's buffer.
pub type Bytes = Data<Vec<u8>, Vec<u8>>;

/// A command that has been sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    token: u64,
    /// Its command identifier, for Abort.
    pub cid: u16,
}

/// One connection with its commands in flight.
pub struct Queue {
    inner: RefCell<Inner>,
}

struct Inner {
    machine: Machine,
    stream: TcpStream,
    next_token: u64,
    finished: HashMap<u64, Completion<Vec<u8>, Vec<u8>>>,
    /// Why the connection is gone, and the buffers of what was in flight then.
    lost: Option<HostError>,
    orphans: HashMap<u64, Bytes>,
}

impl Queue {
    /// Connects, and exchanges ICReq and ICResp.
    pub fn open(addr: SocketAddr, options: ConnectionOptions) -> Result<Queue, HostError> {
        let stream = open_stream(addr)?;
        let mut inner = Inner {
            machine: Connection::new(options),
            stream,
            next_token: 0,
            finished: HashMap::new(),
            lost: None,
            orphans: HashMap::new(),
        };
        inner.flush()?;
        while !inner.machine.is_open() {
            inner.receive()?;
        }
        Ok(Queue { inner: RefCell::new(inner) })
    }

    /// The socket and the machine, for a caller that drives them itself. Completions that were not waited for are lost.
    pub fn into_parts(self) -> (TcpStream, Machine) {
        let inner = self.inner.into_inner();
        (inner.stream, inner.machine)
    }

    /// How long to wait for the peer; `None` for ever.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> Result<(), HostError> {
        Ok(self.inner.borrow().stream.set_read_timeout(timeout)?)
    }

    pub fn granted(&self) -> Option<Granted> {
        self.inner.borrow().machine.granted()
    }

    /// The socket, to shut it down or to inject bytes between PDUs.
    pub fn stream(&self) -> Ref<'_, TcpStream> {
        Ref::map(self.inner.borrow(), |inner| &inner.stream)
    }

    /// Sends a command and returns at once; waits for a slot if all are taken.
    pub fn submit(&self, sqe: Sqe, data: Bytes) -> Result<Ticket, HostError> {
        self.inner.borrow_mut().submit(sqe, data).map_err(|(error, _)| error)
    }

    /// Waits for a command. The buffer comes back in every case.
    pub fn wait(&self, ticket: Ticket) -> (Result<Cqe, HostError>, Bytes) {
        self.inner.borrow_mut().wait(ticket.token)
    }

    /// Whether the command has finished, without waiting; [`Queue::wait`] then returns at once.
    pub fn is_finished(&self, ticket: Ticket) -> bool {
        self.inner.borrow().finished.contains_key(&ticket.token)
    }

    /// Sends a command and waits for it.
    pub fn run(&self, sqe: Sqe, data: Bytes) -> (Result<Cqe, HostError>, Bytes) {
        let mut inner = self.inner.borrow_mut();
        match inner.submit(sqe, data) {
            Ok(ticket) => inner.wait(ticket.token),
            Err((error, data)) => (Err(error), data),
        }
    }
}

impl Inner {
    fn submit(&mut self, sqe: Sqe, data: Bytes) -> Result<Ticket, (HostError, Bytes)> {
        while self.lost.is_none() && self.machine.free_slots() == 0 {
            if let Err(error) = self.receive() {
                return Err((error, data));
            }
        }
        if let Some(error) = &self.lost {
            return Err((error.clone(), data));
        }
        let token = self.next_token;
        self.next_token += 1;
        let cid = match self.machine.submit(sqe, data, token) {
            Ok(cid) => cid,
            Err(refused) => return Err((refused.why.into(), refused.data)),
        };
        match self.flush() {
            Ok(()) => Ok(Ticket { token, cid }),
            Err(error) => {
                let data = self.orphans.remove(&token).unwrap_or(Data::None);
                Err((error, data))
            }
        }
    }

    fn wait(&mut self, token: u64) -> (Result<Cqe, HostError>, Bytes) {
        loop {
            if let Some(done) = self.finished.remove(&token) {
                return (Ok(done.cqe), done.data);
            }
            if let Some(error) = &self.lost {
                return (Err(error.clone()), self.orphans.remove(&token).unwrap_or(Data::None));
            }
            // A timeout does not lose the connection; any other error does, and the loop then ends above.
            if let Err(error @ HostError::Timeout { .. }) = self.receive() {
                return (Err(error), Data::None);
            }
        }
    }

    fn flush(&mut self) -> Result<(), HostError> {
        while self.machine.has_transmit() {
            let mut slices = [IoSlice::new(&[]); TRANSMIT_SLICES];
            let used = self.machine.transmit_slices(&mut slices);
            match self.stream.write_vectored(&slices[..used]) {
                Ok(0) => return Err(self.lose(HostError::Closed)),
                Ok(n) => self.machine.on_transmitted(n),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lose(error.into())),
            }
        }
        Ok(())
    }

    /// Waits for bytes, handles them, sends what they ask for.
    fn receive(&mut self) -> Result<(), HostError> {
        let outcome = {
            let mut slices = self.machine.receive_slices();
            self.stream.read_vectored(&mut slices)
        };
        match outcome {
            Ok(0) => return Err(self.lose(HostError::Closed)),
            Ok(n) => {
                if let Err(error) = self.machine.on_received(n) {
                    // The termination request is a courtesy: the peer may be gone.
                    let _ = self.flush();
                    return Err(self.lose(error.into()));
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let timeout = self.stream.read_timeout().ok().flatten().unwrap_or_default();
                return Err(HostError::Timeout { ms: timeout.as_millis() as u64 });
            }
            Err(error) => return Err(self.lose(error.into())),
        }
        self.flush()?;
        while let Some(done) = self.machine.poll_completion() {
            self.finished.insert(done.token, done);
        }
        Ok(())
    }

    fn lose(&mut self, error: HostError) -> HostError {
        while let Some(done) = self.machine.poll_completion() {
            self.finished.insert(done.token, done);
        }
        self.orphans.extend(self.machine.take_in_flight());
        self.lost.get_or_insert(error).clone()
    }
}

impl CommandQueue for Queue {
    type In = Vec<u8>;
    type Out = Vec<u8>;

    fn open(addr: SocketAddr, options: ConnectionOptions) -> impl Future<Output = Result<Queue, HostError>> {
        ready(Queue::open(addr, options))
    }

    fn execute(&self, sqe: Sqe, data: Bytes) -> impl Future<Output = (Result<Cqe, HostError>, Bytes)> {
        ready(self.run(sqe, data))
    }

    fn set_in_capsule_bytes(&self, bytes: u32) {
        self.inner.borrow_mut().machine.set_in_capsule_bytes(bytes);
    }

    fn in_buffer(len: usize) -> Vec<u8> {
        vec![0; len]
    }

    fn out_buffer(content: &[u8]) -> Vec<u8> {
        content.to_vec()
    }

    fn pause(time: Duration) -> impl Future<Output = ()> {
        std::thread::sleep(time);
        ready(())
    }
}

fn open_stream(addr: SocketAddr) -> Result<TcpStream, HostError> {
    let connect = |source| HostError::Connect { addr, source: Arc::new(source) };
    let stream = TcpStream::connect_timeout(&addr, TIMEOUT_DEFAULT).map_err(connect)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT_DEFAULT))?;
    Ok(stream)
}
