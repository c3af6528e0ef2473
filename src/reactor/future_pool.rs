//! [`FuturePool`]: many futures of one type inside one task, started and finished without allocating.
//!
//! A slot is a pinned box made once and refilled in place. Each slot has its own waker, which marks the
//! slot in its group's bitmap and wakes the task that polls the pool; so a poll touches only the futures
//! that were woken.

#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

const GROUP: usize = 64;

/// Reusable pinned slots for futures of type `F`.
pub struct FuturePool<F: Future> {
    slots: Vec<Slot<F>>,
    groups: Vec<Group>,
    free: Vec<usize>,
    live: usize,
}

struct Slot<F> {
    future: Pin<Box<Option<F>>>,
    waker: Waker,
}

struct Group {
    shared: Arc<GroupShared>,
    /// Woken slots taken from `shared` that were not polled yet.
    taken: u64,
    /// The waker last registered in `shared`.
    parent: Option<Waker>,
}

struct GroupShared {
    woken: AtomicU64,
    parent: Mutex<Option<Waker>>,
}

struct SlotWaker {
    group: Arc<GroupShared>,
    bit: u64,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // With other bits set already, whoever set the first has woken the task, and it will see this one.
        if self.group.woken.fetch_or(self.bit, Ordering::SeqCst) == 0 {
            let parent = self.group.parent.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(parent) = parent {
                parent.wake();
            }
        }
    }
}

impl<F: Future> FuturePool<F> {
    /// A pool with `capacity` slots made ahead. It grows when more are needed.
    pub fn new(capacity: usize) -> FuturePool<F> {
        let mut pool = FuturePool { slots: Vec::new(), groups: Vec::new(), free: Vec::new(), live: 0 };
        pool.grow(capacity);
        pool
    }

    fn grow(&mut self, capacity: usize) {
        let old = self.slots.len();
        for index in old..capacity {
            if index.is_multiple_of(GROUP) {
                let shared = GroupShared { woken: AtomicU64::new(0), parent: Mutex::new(None) };
                self.groups.push(Group { shared: Arc::new(shared), taken: 0, parent: None });
            }
            let group = Arc::clone(&self.groups[index / GROUP].shared);
            let waker = Waker::from(Arc::new(SlotWaker { group, bit: 1 << (index % GROUP) }));
            self.slots.push(Slot { future: Box::pin(None), waker });
        }
        self.free.reserve(self.slots.len());
        self.free.extend((old..self.slots.len()).rev());
    }

    /// Puts `future` into a free slot; it is first polled by the next [`FuturePool::poll_ready`]. Returns
    /// the slot's number, which is free again once the output was given out.
    pub fn start(&mut self, future: F) -> usize {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.grow(self.slots.len() * 2 + 1);
                self.free.pop().expect("a pool that has just grown has a free slot")
            }
        };
        self.slots[slot].future.set(Some(future));
        self.groups[slot / GROUP].taken |= 1 << (slot % GROUP);
        self.live += 1;
        slot
    }

    /// Polls what was started or woken until one future is done, and returns its slot and output. `None`:
    /// all are pending (or there are none), and the task is woken when one of them is.
    pub fn poll_ready(&mut self, cx: &mut Context<'_>) -> Option<(usize, F::Output)> {
        for index in 0..self.groups.len() {
            let group = &mut self.groups[index];
            group.register(cx.waker());
            if group.shared.woken.load(Ordering::Relaxed) != 0 {
                group.taken |= group.shared.woken.swap(0, Ordering::SeqCst);
            }
            while self.groups[index].taken != 0 {
                let taken = &mut self.groups[index].taken;
                let bit = taken.trailing_zeros() as usize;
                *taken &= *taken - 1;
                if let Some(done) = self.poll_slot(index * GROUP + bit) {
                    return Some(done);
                }
            }
        }
        None
    }

    fn poll_slot(&mut self, index: usize) -> Option<(usize, F::Output)> {
        let slot = &mut self.slots[index];
        let mut context = Context::from_waker(&slot.waker);
        // A stale wake may name a slot that is empty.
        let Poll::Ready(output) = slot.future.as_mut().as_pin_mut()?.poll(&mut context) else { return None };
        slot.future.set(None);
        self.free.push(index);
        self.live -= 1;
        Some((index, output))
    }

    /// Futures that are not done.
    pub fn len(&self) -> usize {
        self.live
    }

    pub fn is_empty(&self) -> bool {
        self.live == 0
    }
}

impl Group {
    fn register(&mut self, waker: &Waker) {
        if self.parent.as_ref().is_some_and(|parent| parent.will_wake(waker)) {
            return;
        }
        self.parent = Some(waker.clone());
        *self.shared.parent.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker.clone());
    }
}
