//! Reactors: one thread bound to one core, running `!Send` tasks to completion without locks.
//!
//! Owns: the executor ([`Executor`]), timers, the io_uring of the thread, the mailbox through which other
//! threads hand it work, and the idle back-off. Everything above talks to a reactor through a
//! [`ReactorHandle`] from outside and through the free functions of this module from inside.
//!
//! One turn of a reactor: read the clock, fire timers, take in what other threads sent, poll every ready
//! task once, look at the ring. The kernel is entered only when there is something to submit or the kernel
//! says that it holds completions; when nothing is runnable the reactor spins for a moment, then sleeps in
//! `io_uring_enter` until a completion, a timer or a kick.
//!
//! May assume: nobody blocks on a reactor thread.
//!
//! Survives a crash: nothing.

mod affinity;
mod atomic;
mod block_on;
mod executor;
mod future_pool;
pub mod gate;
mod handle;
pub mod ring;
mod runtime;
mod sim;
pub mod sync;
mod time;
mod timer;
mod wake;
mod world;

pub use block_on::block_on;
pub use executor::{Executor, Pass, now, spawn};
pub use future_pool::FuturePool;
pub use handle::{ReactorGone, ReactorHandle, ReactorId, ReactorStats};
pub use ring::{readable, writable};
pub use runtime::{PollMode, ReactorConfig, ReactorError, Reactors, current, spin};
pub use sim::SimReactors;
pub use time::{Sleep, sleep, sleep_until, with_deadline, yield_idle, yield_now};
pub use world::{new_uuid, seat, unix_now};

#[cfg(test)]
mod tests;
