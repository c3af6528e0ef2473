//! [`ReactorHandle`]: how other threads reach a reactor.

#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::Sender;

use super::wake::Remote;
use super::{executor, runtime, sync::oneshot};

/// Number of a reactor, from 0 in the order of the configured cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReactorId(pub u16);

impl fmt::Display for ReactorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The reactor ended before it could answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the reactor has stopped")]
pub struct ReactorGone;

/// Counters of one reactor since its start.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReactorStats {
    /// Turns of the loop.
    pub loops: u64,
    /// Turns in which a task had work.
    pub busy: u64,
    /// Time asleep, in nanoseconds.
    pub idle_ns: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Tasks alive.
    pub tasks: u64,
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Operations given to the ring that have not completed.
    pub in_flight: u64,
}

/// What the reactor thread publishes; written by it alone, read by anyone.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) loops: AtomicU64,
    pub(super) busy: AtomicU64,
    pub(super) idle_ns: AtomicU64,
    pub(super) sleeps: AtomicU64,
    pub(super) tasks: AtomicU64,
    pub(super) enters: AtomicU64,
    pub(super) in_flight: AtomicU64,
}

/// Work sent to a reactor: runs there, inside its executor.
pub(super) type Message = Box<dyn FnOnce() + Send>;

pub(super) struct Shared {
    pub(super) id: ReactorId,
    pub(super) core: usize,
    pub(super) remote: Arc<Remote>,
    pub(super) inbox: Sender<Message>,
    pub(super) counters: Counters,
}

/// A reactor, seen from any thread. Cheap to clone.
#[derive(Clone)]
pub struct ReactorHandle {
    pub(super) shared: Arc<Shared>,
}

impl ReactorHandle {
    pub fn id(&self) -> ReactorId {
        self.shared.id
    }

    /// The core the reactor is bound to.
    pub fn core(&self) -> usize {
        self.shared.core
    }

    /// Whether the calling thread is this reactor.
    pub fn is_current(&self) -> bool {
        executor::with_current(|core| core.remote_id() == self.shared.remote.id()).unwrap_or(false)
    }

    /// Runs `make()` on the reactor and polls the future there, starting now whether or not the returned
    /// future is polled. The result may be awaited on any executor; dropping it does not stop the work.
    pub fn call<F, Fut, T>(
        &self,
        make: F,
    ) -> impl Future<Output = Result<T, ReactorGone>> + Send + use<F, Fut, T>
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        self.spawn(move || {
            let future = make();
            async move {
                // The caller may have lost interest.
                let _ = reply.send(future.await);
            }
        });
        async move { answer.await.map_err(|_| ReactorGone) }
    }

    /// Runs `make()` on the reactor and its future as a task there. Does nothing when the reactor is gone.
    pub fn spawn<F, Fut>(&self, make: F)
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let message: Message = Box::new(move || executor::spawn(make()));
        if self.shared.inbox.send(message).is_ok() {
            self.shared.remote.signal();
        }
    }

    pub fn stats(&self) -> ReactorStats {
        let counters = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReactorStats {
            loops: read(&counters.loops),
            busy: read(&counters.busy),
            idle_ns: read(&counters.idle_ns),
            sleeps: read(&counters.sleeps),
            tasks: read(&counters.tasks),
            enters: read(&counters.enters),
            in_flight: read(&counters.in_flight),
        }
    }
}

impl fmt::Debug for ReactorHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReactorHandle")
            .field("id", &self.shared.id.0)
            .field("core", &self.shared.core)
            .finish()
    }
}

/// The reactor whose thread this is.
pub(super) fn current() -> Option<ReactorHandle> {
    runtime::with_reactor(|reactor| reactor.handle.clone())
}
