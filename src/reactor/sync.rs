//! Waiting for other tasks: within one reactor ([`Event`], [`Semaphore`]) and across threads ([`oneshot`],
//! [`mailbox`]).

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use super::atomic::{AtomicBool, fence};

/// A channel for one value, between any two threads and executors.
pub mod oneshot {
    pub use tokio::sync::oneshot::error::RecvError;
    pub use tokio::sync::oneshot::{Receiver, Sender, channel};
}

/// Wakes everyone who waits. One thread only.
///
/// ```text
/// while !condition() { event.wait().await }       // elsewhere: change it, then event.notify()
/// ```
#[derive(Default)]
pub struct Event {
    generation: Cell<u64>,
    waiters: RefCell<Vec<Waker>>,
}

impl Event {
    pub fn new() -> Event {
        Event::default()
    }

    /// Wakes all who wait now.
    pub fn notify(&self) {
        self.generation.set(self.generation.get() + 1);
        let mut waiters = self.waiters.take();
        waiters.drain(..).for_each(Waker::wake);
        // Keep the capacity, unless someone began to wait meanwhile.
        let mut current = self.waiters.borrow_mut();
        if current.is_empty() {
            *current = waiters;
        }
    }

    /// Waits for the next [`Event::notify`] after this call.
    pub fn wait(&self) -> impl Future<Output = ()> + '_ {
        let seen = self.generation.get();
        poll_fn(move |cx| {
            if self.generation.get() != seen {
                return Poll::Ready(());
            }
            let mut waiters = self.waiters.borrow_mut();
            if !waiters.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiters.push(cx.waker().clone());
            }
            Poll::Pending
        })
    }
}

/// A counting semaphore, first come first served. One thread only.
pub struct Semaphore {
    state: RefCell<SemaphoreState>,
}

struct SemaphoreState {
    permits: usize,
    next_ticket: u64,
    waiters: VecDeque<Waiter>,
}

struct Waiter {
    ticket: u64,
    wanted: usize,
    waker: Waker,
}

impl Semaphore {
    pub fn new(permits: usize) -> Semaphore {
        let state = SemaphoreState { permits, next_ticket: 0, waiters: VecDeque::new() };
        Semaphore { state: RefCell::new(state) }
    }

    /// Permits that are free now.
    pub fn available(&self) -> usize {
        self.state.borrow().permits
    }

    /// Takes `wanted` permits, after everyone who asked before. They come back when the result is dropped.
    pub async fn acquire(&self, wanted: usize) -> Permit<'_> {
        let mut turn = Turn { semaphore: self, wanted, ticket: None };
        poll_fn(|cx| turn.poll(cx.waker())).await;
        Permit { semaphore: self, count: wanted }
    }

    /// Takes `wanted` permits if they are free and nobody waits.
    pub fn try_acquire(&self, wanted: usize) -> Option<Permit<'_>> {
        let mut state = self.state.borrow_mut();
        if !state.waiters.is_empty() || state.permits < wanted {
            return None;
        }
        state.permits -= wanted;
        Some(Permit { semaphore: self, count: wanted })
    }

    /// Adds permits.
    pub fn release(&self, count: usize) {
        self.state.borrow_mut().permits += count;
        self.wake_front();
    }

    fn wake_front(&self) {
        let state = self.state.borrow();
        if let Some(front) = state.waiters.front().filter(|front| front.wanted <= state.permits) {
            front.waker.wake_by_ref();
        }
    }
}

/// Permits of a [`Semaphore`], given back on drop.
pub struct Permit<'a> {
    semaphore: &'a Semaphore,
    count: usize,
}

impl Permit<'_> {
    /// Keeps the permits taken for good, or until [`Semaphore::release`].
    pub fn forget(mut self) {
        self.count = 0;
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.count > 0 {
            self.semaphore.release(self.count);
        }
    }
}

/// A place in the queue; left when dropped.
struct Turn<'a> {
    semaphore: &'a Semaphore,
    wanted: usize,
    ticket: Option<u64>,
}

impl Turn<'_> {
    fn poll(&mut self, waker: &Waker) -> Poll<()> {
        let mut state = self.semaphore.state.borrow_mut();
        let is_front = match self.ticket {
            None => state.waiters.is_empty(),
            Some(ticket) => state.waiters.front().is_some_and(|front| front.ticket == ticket),
        };
        if is_front && state.permits >= self.wanted {
            state.permits -= self.wanted;
            if self.ticket.take().is_some() {
                state.waiters.pop_front();
            }
            drop(state);
            self.semaphore.wake_front();
            return Poll::Ready(());
        }
        match self.ticket {
            None => {
                let ticket = state.next_ticket;
                state.next_ticket += 1;
                state.waiters.push_back(Waiter { ticket, wanted: self.wanted, waker: waker.clone() });
                self.ticket = Some(ticket);
            }
            Some(ticket) => {
                if let Some(entry) = state.waiters.iter_mut().find(|entry| entry.ticket == ticket) {
                    entry.waker.clone_from(waker);
                }
            }
        }
        Poll::Pending
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        self.semaphore.state.borrow_mut().waiters.retain(|entry| entry.ticket != ticket);
        self.semaphore.wake_front();
    }
}

/// A bounded queue from any number of threads to one task: lock-free, allocates nothing after its creation.
pub fn mailbox<T: Send>(capacity: usize) -> (MailboxSender<T>, Mailbox<T>) {
    let (sender, receiver) = crossbeam_channel::bounded(capacity);
    let signal = Arc::new(Signal { waiting: AtomicBool::new(false), waker: Mutex::new(None) });
    let mailbox = Mailbox { receiver, signal: Arc::clone(&signal) };
    (MailboxSender { sender: Some(sender), signal }, mailbox)
}

struct Signal {
    waiting: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Signal {
    fn notify(&self) {
        if self.waiting.load(Ordering::SeqCst) && self.waiting.swap(false, Ordering::SeqCst) {
            let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

/// The sending half of a [`mailbox`].
pub struct MailboxSender<T> {
    sender: Option<crossbeam_channel::Sender<T>>,
    signal: Arc<Signal>,
}

/// Why a value was not taken; the value comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendError<T> {
    Full(T),
    Closed(T),
}

impl<T: Send> MailboxSender<T> {
    /// Puts `value` in the queue. Never waits.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        use crossbeam_channel::TrySendError;
        let Some(sender) = &self.sender else { return Err(SendError::Closed(value)) };
        sender.try_send(value).map_err(|error| match error {
            TrySendError::Full(value) => SendError::Full(value),
            TrySendError::Disconnected(value) => SendError::Closed(value),
        })?;
        fence(Ordering::SeqCst);
        self.signal.notify();
        Ok(())
    }
}

impl<T> Clone for MailboxSender<T> {
    fn clone(&self) -> MailboxSender<T> {
        MailboxSender { sender: self.sender.clone(), signal: Arc::clone(&self.signal) }
    }
}

impl<T> Drop for MailboxSender<T> {
    fn drop(&mut self) {
        // First the sender, so that the receiver, once woken, sees that it was the last.
        self.sender = None;
        self.signal.notify();
    }
}

/// The receiving half of a [`mailbox`].
pub struct Mailbox<T> {
    receiver: crossbeam_channel::Receiver<T>,
    signal: Arc<Signal>,
}

impl<T: Send> Mailbox<T> {
    /// The next value if one is there.
    pub fn try_recv(&mut self) -> Option<T> {
        self.receiver.try_recv().ok()
    }

    /// The next value; `None` once the queue is empty and every sender is gone.
    pub async fn recv(&mut self) -> Option<T> {
        poll_fn(|cx| self.poll_recv(cx.waker())).await
    }

    pub fn poll_recv(&mut self, waker: &Waker) -> Poll<Option<T>> {
        use crossbeam_channel::TryRecvError;
        let attempt = |receiver: &crossbeam_channel::Receiver<T>| match receiver.try_recv() {
            Ok(value) => Poll::Ready(Some(value)),
            Err(TryRecvError::Disconnected) => Poll::Ready(None),
            Err(TryRecvError::Empty) => Poll::Pending,
        };
        let first = attempt(&self.receiver);
        if first.is_ready() {
            return first;
        }
        *self.signal.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
        self.signal.waiting.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // What was sent before the sender could see `waiting`.
        attempt(&self.receiver)
    }
}
