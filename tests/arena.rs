//! The arena's budget, and that steady state allocates nothing: one test, since both need the process to
//! themselves.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use rimrock::memory::{self, ArenaConfig, DmaBuf};
use rimrock::reactor::{Executor, FuturePool, yield_idle, yield_now};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: forwards to the system's allocator; the count is a plain thread-local.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[test]
fn budget_and_steady_state() {
    the_budget_is_kept_and_memory_moves_between_sizes();
    buffers_in_steady_state_allocate_nothing();
    tasks_in_steady_state_allocate_nothing();
}

fn the_budget_is_kept_and_memory_moves_between_sizes() {
    const BUDGET: usize = 16 << 20;
    /// What one buffer beyond the budget may leave mapped.
    const CHUNK: usize = 2 << 20;
    memory::configure(&ArenaConfig { budget: BUDGET, ..ArenaConfig::default() });
    for len in [4096, 128 << 10, 2 << 20, 5 << 20, 4096] {
        let mut held = Vec::new();
        while let Some(buf) = DmaBuf::try_uninit(len) {
            held.push(buf);
            assert!(held.len() * len <= BUDGET + CHUNK, "more than the budget in buffers of {len}");
        }
        assert!(held.len() * len >= BUDGET / 8 * 5, "{} buffers of {len}", held.len());
        assert!(memory::stats().mapped <= BUDGET + CHUNK);
        let beyond = DmaBuf::zeroed(len);
        assert_eq!(beyond.len(), len);
        drop(beyond);
        held.pop();
        assert!(DmaBuf::try_uninit(len).is_some(), "what was given back can be had again");
        // All of it can become buffers of the next size, also what another thread drops.
        std::thread::spawn(move || drop(held)).join().expect("the thread ends");
    }
    memory::configure(&ArenaConfig::default());
}

fn buffers_in_steady_state_allocate_nothing() {
    let round = || {
        let mut held = [const { None }; 200];
        for (index, slot) in held.iter_mut().enumerate() {
            let buf = DmaBuf::try_uninit(4096 << (index % 6)).expect("within the budget");
            let slice = buf.freeze();
            *slot = Some((slice.slice(0..512), slice));
        }
    };
    (0..3).for_each(|_| round());
    let before = allocations();
    (0..100).for_each(|_| round());
    assert_eq!(allocations() - before, 0);
}

fn tasks_in_steady_state_allocate_nothing() {
    let mut executor = Executor::new();
    let done = Rc::new(Cell::new(0u64));
    for task in 0..8 {
        let done = Rc::clone(&done);
        executor.spawn(async move {
            let mut pool = FuturePool::new(32);
            let mut turns = 0u64;
            poll_fn(|cx| -> Poll<()> {
                while pool.len() < 32 {
                    turns += 1;
                    let idle = turns.is_multiple_of(3 + task);
                    pool.start(async move {
                        match idle {
                            true => yield_idle().await,
                            false => yield_now().await,
                        }
                    });
                }
                while pool.poll_ready(cx).is_some() {
                    done.set(done.get() + 1);
                }
                cx.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
        });
    }
    for _ in 0..1000 {
        executor.pass();
    }
    let (before, finished) = (allocations(), done.get());
    for _ in 0..1000 {
        executor.pass();
    }
    assert!(done.get() - finished > 10_000, "{} futures finished", done.get() - finished);
    assert_eq!(allocations() - before, 0);
}
