//! NVMe/TCP initiator: the other end of `target`, used by tests, the benchmark, import and export, and remote devices.
//!
//! - [`connection`]: one connection as a machine without I/O; everything a target sends is judged there.
//! - [`controller`]: an admin queue and I/O queues, the handshakes and the commands, over any [`CommandQueue`].
//! - [`queue`]: that on a reactor; [`connect`] gives an [`Initiator`].
//! - [`blocking`]: the machine on a blocking socket, and raw PDUs, for tests and small tools.
//! - [`bench`]: the load generator of `rimrock bench`, with byte by byte verification.
//!
//! What survives a crash: nothing. An initiator has no state that outlives its connections.
#![forbid(unsafe_code)]

pub mod bench;
pub mod blocking;
pub mod connection;
pub mod controller;
mod error;
pub mod namespace;
pub mod queue;

use std::future::Future;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

pub use connection::{Completion, Connection, ConnectionOptions, Data, Granted, ProtocolError};
pub use controller::{Controller, ControllerOptions};
pub use error::HostError;
pub use namespace::Namespace;
pub use queue::{Initiator, Queue, connect};

use crate::nvme::{Cqe, Sqe};

/// One queue of a controller as [`Controller`] uses it: a connection that executes commands.
pub trait CommandQueue: Sized {
    /// Buffers that a controller fills.
    type In: DerefMut<Target = [u8]>;
    /// Buffers that are sent to a controller.
    type Out: Deref<Target = [u8]>;

    /// Connects the socket and exchanges ICReq and ICResp.
    fn open(addr: SocketAddr, options: ConnectionOptions) -> impl Future<Output = Result<Self, HostError>>;

    /// Sends one command and waits for its completion. An error is the connection's; what the controller made of the
    /// command is in the completion. The buffer always comes back.
    fn execute(
        &self,
        sqe: Sqe,
        data: Data<Self::In, Self::Out>,
    ) -> impl Future<Output = (Result<Cqe, HostError>, Data<Self::In, Self::Out>)>;

    /// From now on commands carry up to this many bytes in their capsule.
    fn set_in_capsule_bytes(&self, bytes: u32);

    /// A zeroed buffer for the controller to fill.
    fn in_buffer(len: usize) -> Self::In;

    /// A buffer to send, with this content.
    fn out_buffer(content: &[u8]) -> Self::Out;

    /// Waits, as one does between two looks at a register.
    fn pause(time: Duration) -> impl Future<Output = ()>;
}
