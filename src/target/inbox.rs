//! How other threads reach the task of a connection.
//!
//! A task that is busy looks at one atomic flag per turn; only when it is set does it take the lock. A task that parks
//! leaves its waker here. Messages are few by nature: one to close, at most as many aborts as the host may have
//! outstanding, and a nudge that says "look at your controller" and is never queued twice.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// Why a connection is told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// Its controller is going away: its admin queue has ended, or its keep alive timer has run out.
    ControllerGone,
    /// The host disabled or shut down the controller; its I/O queues end with that.
    ControllerDisabled,
    /// The subsystem was deleted, the host removed from its list, or the listener taken away.
    Administrative,
}

#[derive(Debug)]
pub enum Message {
    Close(CloseReason),
    /// Abort command `cid` if that is still possible, and tell `reply_to`.
    Abort {
        cid: u16,
        token: u32,
        reply_to: Arc<Inbox>,
    },
    /// The answer to an abort asked for by the command `token`.
    AbortDone {
        token: u32,
        aborted: bool,
    },
}

#[derive(Default)]
pub struct Inbox {
    flag: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    messages: Vec<Message>,
    waker: Option<Waker>,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn post(&self, message: Message) {
        let mut state = self.state();
        state.messages.push(message);
        self.signal(state);
    }

    /// Makes the task look at what it shares with others.
    pub fn nudge(&self) {
        self.signal(self.state());
    }

    fn signal(&self, mut state: MutexGuard<'_, State>) {
        self.flag.store(true, Ordering::Release);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Something was posted since [`Inbox::take`].
    pub fn is_flagged(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// Moves what was posted into `into` and clears the flag.
    pub fn take(&self, into: &mut Vec<Message>) {
        let mut state = self.state();
        self.flag.store(false, Ordering::Release);
        into.append(&mut state.messages);
    }

    /// Leaves the waker of a task that is about to park; false if there is something to look at first.
    pub fn park(&self, waker: &Waker) -> bool {
        let mut state = self.state();
        if self.flag.load(Ordering::Acquire) {
            return false;
        }
        if !state.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        true
    }
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("flagged", &self.is_flagged()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_parked_task_is_woken_once_and_never_parks_over_a_message() {
        let inbox = Inbox::default();
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        assert!(inbox.park(&waker));
        inbox.post(Message::Close(CloseReason::Administrative));
        inbox.nudge();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(!inbox.park(&waker), "a message waits");
        let mut got = Vec::new();
        inbox.take(&mut got);
        assert!(matches!(got[..], [Message::Close(CloseReason::Administrative)]));
        assert!(!inbox.is_flagged() && inbox.park(&waker));
        inbox.nudge();
        assert_eq!(count.0.load(Ordering::SeqCst), 2);
    }
}
