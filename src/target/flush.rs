//! Flushes of one backend, joined: while one runs, all that come wait, and the next one serves them all.
//!
//! A flush covers what was acknowledged before it was asked for, so whoever comes while one is running cannot have that
//! one's result. Whoever leads a flush tells the others; a leader that is dropped in the middle, with its connection's
//! reactor, hands those who wait for it to the next one.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::IoError;
use crate::reactor::sync::oneshot;

/// The flushes of one backend, from any reactor.
#[derive(Default)]
pub struct Flushes {
    queue: Arc<Mutex<Queue>>,
    /// Flushes that the backend has done.
    done: AtomicU64,
}

#[derive(Default)]
struct Queue {
    is_running: bool,
    /// For the flush after the one that runs.
    waiting: Vec<oneshot::Sender<Turn>>,
}

/// What becomes of one that waits.
enum Turn {
    Done(Result<(), IoError>),
    Lead(Lead),
}

/// The right to flush, and those who wait for the result.
struct Lead {
    queue: Arc<Mutex<Queue>>,
    followers: Vec<oneshot::Sender<Turn>>,
}

impl Flushes {
    /// Makes what was acknowledged before this call durable, by `flush` or by another caller's that starts later.
    pub async fn run<F>(&self, flush: impl FnOnce() -> F) -> Result<(), IoError>
    where
        F: Future<Output = Result<(), IoError>>,
    {
        let mut lead = match self.enter() {
            Ok(lead) => lead,
            Err(turn) => match turn.await {
                Ok(Turn::Lead(lead)) => lead,
                Ok(Turn::Done(result)) => return result,
                Err(_) => return Err(IoError::Internal("a flush was forgotten")),
            },
        };
        let result = flush().await;
        self.done.fetch_add(1, Ordering::Relaxed);
        for follower in lead.followers.drain(..) {
            // It may have left.
            let _ = follower.send(Turn::Done(result.clone()));
        }
        result
    }

    /// Flushes that the backend has done.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    fn enter(&self) -> Result<Lead, oneshot::Receiver<Turn>> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut queue.is_running, true) {
            return Ok(Lead { queue: Arc::clone(&self.queue), followers: Vec::new() });
        }
        let (sender, receiver) = oneshot::channel();
        queue.waiting.push(sender);
        Err(receiver)
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        let mut followers = std::mem::take(&mut self.followers);
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        followers.append(&mut queue.waiting);
        followers.retain(|follower| !follower.is_closed());
        let Some(next) = followers.pop() else {
            queue.is_running = false;
            return;
        };
        drop(queue);
        // If it leaves at this moment the right comes back, is dropped, and goes to the next.
        let _ = next.send(Turn::Lead(Lead { queue: Arc::clone(&self.queue), followers }));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    type Flush<'a> = Pin<Box<dyn Future<Output = Result<(), IoError>> + 'a>>;

    fn poll(flush: &mut Flush<'_>) -> Poll<Result<(), IoError>> {
        flush.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    /// A backend whose flushes end when told to.
    #[derive(Default)]
    struct Backend {
        started: Cell<usize>,
        allowed: Cell<usize>,
    }

    impl Backend {
        async fn flush(&self) -> Result<(), IoError> {
            self.started.set(self.started.get() + 1);
            let number = self.started.get();
            std::future::poll_fn(
                |_| if self.allowed.get() >= number { Poll::Ready(()) } else { Poll::Pending },
            )
            .await;
            if number == 2 { Err(IoError::Busy) } else { Ok(()) }
        }
    }

    #[test]
    fn who_comes_while_a_flush_runs_has_the_result_of_the_next() {
        let (flushes, backend) = (Flushes::default(), Backend::default());
        let start = || -> Flush<'_> { Box::pin(flushes.run(|| backend.flush())) };
        let mut first = start();
        assert!(poll(&mut first).is_pending());
        let mut others: Vec<_> = (0..100).map(|_| start()).collect();
        assert!(others.iter_mut().all(|flush| poll(flush).is_pending()));
        assert_eq!(backend.started.get(), 1);
        backend.allowed.set(1);
        assert!(matches!(poll(&mut first), Poll::Ready(Ok(()))));
        // None of the others is served by the flush that ran when they came.
        assert!(others.iter_mut().all(|flush| poll(flush).is_pending()));
        assert_eq!(backend.started.get(), 2);
        let mut late = start();
        assert!(poll(&mut late).is_pending());
        backend.allowed.set(2);
        let results: Vec<_> = others.iter_mut().rev().map(poll).collect();
        assert!(results.iter().all(|result| matches!(result, Poll::Ready(Err(IoError::Busy)))));
        backend.allowed.set(3);
        assert!(matches!(poll(&mut late), Poll::Ready(Ok(()))));
        assert_eq!((backend.started.get(), flushes.done()), (3, 3));
    }

    #[test]
    fn those_who_leave_take_nobody_with_them() {
        let (flushes, backend) = (Flushes::default(), Backend::default());
        let start = || -> Flush<'_> { Box::pin(flushes.run(|| backend.flush())) };
        let mut all: Vec<_> = (0..5).map(|_| start()).collect();
        assert!(all.iter_mut().all(|flush| poll(flush).is_pending()));
        // The leader leaves, then the one that was to lead, before it knows, then one that follows.
        drop(all.remove(0));
        drop(all.pop());
        drop(all.remove(0));
        backend.allowed.set(9);
        let mut ended = 0;
        for _ in 0..3 {
            all.retain_mut(|flush| {
                poll(flush).is_pending() || {
                    ended += 1;
                    false
                }
            });
        }
        assert_eq!((ended, all.len()), (2, 0));
        assert!(pin!(start()).as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }
}
