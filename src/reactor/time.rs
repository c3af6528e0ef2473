//! Futures about time and turns: sleeping, yielding, deadlines.

#![forbid(unsafe_code)]

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::executor::{self, now};
use super::timer::TimerKey;

/// Waits until the reactor's clock reaches a deadline. Made by [`sleep`] and [`sleep_until`].
#[must_use = "futures do nothing unless polled"]
pub struct Sleep {
    deadline: Instant,
    /// The executor the timer is armed in, and its name there.
    armed: Option<(u64, TimerKey)>,
}

/// Waits for at least `duration`.
pub fn sleep(duration: Duration) -> Sleep {
    sleep_until(now() + duration)
}

/// Waits until `deadline`.
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep { deadline, armed: None }
}

impl Sleep {
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Moves the deadline; takes effect at the next poll.
    pub fn reset(&mut self, deadline: Instant) {
        self.disarm();
        self.deadline = deadline;
    }

    fn disarm(&mut self) {
        let Some((id, key)) = self.armed.take() else { return };
        executor::with_current(|core| {
            // In another executor (or none) the timer stays, and wakes a task for nothing.
            if core.remote_id() == id {
                core.timers.borrow_mut().cancel(key);
            }
        });
    }
}

impl Future for Sleep {
    type Output = ();

    /// # Panics
    /// When no executor runs on this thread.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if now() >= self.deadline {
            self.disarm();
            return Poll::Ready(());
        }
        let deadline = self.deadline;
        let old = self.armed;
        let armed = executor::with_current(|core| {
            let mut timers = core.timers.borrow_mut();
            let id = core.remote_id();
            match old {
                Some((old_id, key)) if old_id == id && timers.update(key, cx.waker()) => (id, key),
                _ => (id, timers.arm(deadline, cx.waker().clone())),
            }
        });
        let Some(armed) = armed else {
            panic!("sleep outside of a reactor: no executor runs on this thread")
        };
        self.armed = Some(armed);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.disarm();
    }
}

/// Lets every other ready task run, then goes on in the next pass. Counts as work: the reactor stays awake.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// As [`yield_now`], for a task that looked for work and found none: the pass does not count as work, so
/// the reactor's idle time is accounted truly. A reactor with such a task spins; the task itself must park
/// (see [`super::spin`]) when it has found nothing for long.
pub async fn yield_idle() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        executor::wake_idle(cx.waker());
        Poll::Pending
    })
    .await;
}

/// The output of `future`, or `None` (and the future dropped) once the clock has passed `deadline`.
pub async fn with_deadline<F: Future>(deadline: Instant, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut timer = pin!(sleep_until(deadline));
    poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        timer.as_mut().poll(cx).map(|()| None)
    })
    .await
}
