//! Tests of buffers and of the arena. The arena is one for the process: what depends on its totals is in
//! `tests/arena.rs`, a process of its own.

use super::*;

#[test]
fn buffers_of_any_length_are_aligned_and_keep_their_bytes() {
    for len in [0, 1, 511, 4096, 4097, 65536, 100_000, 2 << 20, (2 << 20) + 1, 9 << 20] {
        let mut buf = DmaBuf::zeroed(len);
        assert_eq!(buf.len(), len);
        assert!(buf.is_aligned(BUFFER_ALIGN));
        assert!(buf.iter().all(|byte| *byte == 0), "{len} bytes are zero");
        buf.fill(0xa5);
        let slice = buf.freeze();
        assert!(slice.iter().all(|byte| *byte == 0xa5));
    }
}

#[test]
fn no_two_live_buffers_overlap() {
    let mut seed = 0x1234_5678_9abc_def1u64;
    let mut live: Vec<(u8, DmaBuf)> = Vec::new();
    for round in 0..20_000u64 {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        if live.len() > 64 || (seed & 1 == 1 && !live.is_empty()) {
            let (mark, buf) = live.swap_remove(seed as usize / 2 % live.len());
            assert!(buf.iter().all(|byte| *byte == mark), "round {round}: someone else wrote here");
        } else {
            let mark = round as u8;
            let mut buf = DmaBuf::uninit(1 + (seed >> 8) as usize % (4096 << (seed >> 40 & 3)));
            buf.fill(mark);
            live.push((mark, buf));
        }
    }
}

#[test]
fn split_parts_are_disjoint_and_join_again() {
    let mut buf = DmaBuf::zeroed(16384);
    let mut head = buf.split_to(4096);
    let mut tail = buf.split_off(8192);
    assert_eq!((head.len(), buf.len(), tail.len()), (4096, 8192, 4096));
    head.fill(1);
    buf.fill(2);
    tail.fill(3);
    head.unsplit(buf);
    head.unsplit(tail);
    assert_eq!(head.len(), 16384);
    assert!(head[..4096].iter().all(|byte| *byte == 1));
    assert!(head[4096..12288].iter().all(|byte| *byte == 2));
    assert!(head[12288..].iter().all(|byte| *byte == 3));
}

#[test]
#[should_panic(expected = "not neighbours")]
fn parts_that_are_not_neighbours_do_not_join() {
    let mut buf = DmaBuf::zeroed(12288);
    let mut head = buf.split_to(4096);
    let _middle = buf.split_to(4096);
    head.unsplit(buf);
}

#[test]
#[should_panic(expected = "two allocations")]
fn parts_of_two_buffers_do_not_join() {
    DmaBuf::zeroed(4096).unsplit(DmaBuf::zeroed(4096));
}

#[test]
fn slices_share_and_the_last_one_gives_the_buffer_back() {
    let mut slice = DmaSlice::copy_of(b"abcdefgh");
    let copy = slice.slice(2..6);
    let head = slice.split_to(3);
    assert_eq!((&head[..], &slice[..], &copy[..]), (&b"abc"[..], &b"defgh"[..], &b"cdef"[..]));
    let slice = slice.try_into_buf().expect_err("others still look at it");
    drop((head, copy));
    let mut buf = slice.try_into_buf().expect("nobody else is left");
    buf.fill(b'x');
    assert_eq!(&buf[..], b"xxxxx");
}

#[test]
#[should_panic(expected = "slice 2..9")]
fn a_slice_beyond_the_end_is_refused() {
    DmaSlice::copy_of(b"abcdefgh").slice(2..9);
}

#[test]
fn buffers_may_be_dropped_and_shared_across_threads() {
    let (sender, receiver) = std::sync::mpsc::channel::<DmaSlice>();
    let other = std::thread::spawn(move || receiver.iter().map(|slice| u64::from(slice[0])).sum::<u64>());
    let mut kept = Vec::new();
    for round in 0..20_000u64 {
        let mut buf = DmaBuf::uninit(4096 << (round % 3));
        buf.fill(round as u8);
        let slice = buf.freeze();
        if round % 16 == 0 {
            kept.push(slice.clone());
        }
        sender.send(slice).expect("the other thread listens");
    }
    drop(sender);
    let sum = other.join().expect("the other thread ends");
    assert_eq!(sum, (0..20_000u64).map(|round| round & 0xff).sum::<u64>());
    assert!(kept.iter().enumerate().all(|(n, slice)| slice.iter().all(|byte| *byte == (n * 16) as u8)));
}

#[test]
fn a_shared_region_zeroes_exactly_what_it_is_told() {
    let region = SharedRegion::new(64 << 10).expect("64 KiB can be mapped");
    let ones = vec![1u8; 64 << 10];
    for (offset, len) in
        [(0, 64 << 10), (100, 200), (4096, 4096), (4000, 200), (1, 20_000), (8191, 1), (512, 0)]
    {
        region.copy_in(0, &ones);
        region.zero(offset, len);
        let mut after = vec![9u8; 64 << 10];
        region.copy_out(0, &mut after);
        for (at, byte) in after.iter().enumerate() {
            assert_eq!(
                *byte == 0,
                at >= offset && at < offset + len,
                "byte {at} after zeroing {len} at {offset}"
            );
        }
    }
}
