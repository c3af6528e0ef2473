//! Tests of the kinds of device, mostly the same ones for each kind.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::reactor::{ReactorConfig, Reactors, block_on};

/// A directory on the disk that holds the build, since /tmp may be tmpfs.
fn disk_dir() -> TempDir {
    let target = std::env::current_exe().expect("tests have a path");
    let target = target.parent().expect("an executable is in a directory");
    tempfile::tempdir_in(target).expect("the build directory is writable")
}

fn open(uri: &str) -> Result<Device, DeviceError> {
    Device::open(uri, OpenOptions::default())
}

/// Runs `make()` on a reactor of its own.
fn on_reactor<F, Fut, T>(make: F) -> T
where
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let reactors = Reactors::start(ReactorConfig::default()).expect("a reactor starts");
    block_on(reactors.handles()[0].call(make)).expect("the reactor lives")
}

fn pattern(len: usize, seed: u8) -> DmaBuf {
    let mut buf = DmaBuf::uninit(len);
    for (index, byte) in buf.iter_mut().enumerate() {
        *byte = (index as u8).wrapping_mul(31).wrapping_add((index >> 8) as u8) ^ seed;
    }
    buf
}

/// What every kind must do.
async fn conformance(device: Device) {
    let unit = u64::from(device.info().block_size);
    let data = pattern(64 << 10, 1).freeze();
    device.write(8 * unit, data.clone()).await.expect("write");
    let (result, back) = device.read(8 * unit, DmaBuf::uninit(64 << 10)).await;
    result.expect("read");
    assert_eq!(back[..], data[..]);

    // Memory that is not aligned for direct I/O, both ways.
    let odd = data.slice(1..1 + 4096);
    device.write(0, odd.clone()).await.expect("write from odd memory");
    let mut buf = DmaBuf::zeroed(4096 + 3);
    let odd_buf = buf.split_off(3);
    let (result, back) = device.read(0, odd_buf).await;
    result.expect("read to odd memory");
    assert_eq!(back[..], odd[..]);

    let parts = vec![data.slice(0..4096), data.slice(8192..16384), data.slice(4096..8192)];
    device.write_vectored(1 << 20, parts).await.expect("vectored write");
    let (result, back) = device.read(1 << 20, DmaBuf::uninit(16384)).await;
    result.expect("read");
    assert_eq!(back[..4096], data[..4096]);
    assert_eq!(back[4096..12288], data[8192..16384]);
    assert_eq!(back[12288..], data[4096..8192]);

    let odd_parts = vec![data.slice(7..7 + 4096), data.slice(0..4096)];
    device.write_vectored(1 << 20, odd_parts).await.expect("vectored write from odd memory");
    let (_, back) = device.read(1 << 20, DmaBuf::uninit(8192)).await;
    assert_eq!(back[..4096], data[7..7 + 4096]);
    assert_eq!(back[4096..], data[..4096]);
    device.flush().await.expect("flush");

    for zeroing in ["discard", "write_zeroes"] {
        device.write(0, data.clone()).await.expect("write");
        match zeroing {
            "discard" => device.discard(unit, 16384).await.expect("discard"),
            _ => device.write_zeroes(unit, 16384).await.expect("write zeroes"),
        }
        let (_, back) = device.read(0, DmaBuf::uninit(64 << 10)).await;
        let end = unit as usize + 16384;
        assert_eq!(back[..unit as usize], data[..unit as usize], "{zeroing}: before the range");
        assert!(back[unit as usize..end].iter().all(|byte| *byte == 0), "{zeroing}: in the range");
        assert_eq!(back[end..], data[end..], "{zeroing}: after the range");
    }

    let size = device.info().size;
    let block = DmaBuf::zeroed(unit as usize).freeze();
    device.write(size - unit, block.clone()).await.expect("the last block");
    for offset in [size, size - unit + 1, u64::MAX - unit + 1, u64::MAX] {
        assert_eq!(device.write(offset, block.clone()).await, Err(IoError::OutOfRange), "at {offset}");
    }
    assert_eq!(device.discard(0, size + unit).await, Err(IoError::OutOfRange));
    assert_eq!(device.write(0, block.slice(0..100)).await, Err(IoError::OutOfRange));
    let (result, buf) = device.read(size, DmaBuf::uninit(4096)).await;
    assert_eq!((result, buf.len()), (Err(IoError::OutOfRange), 4096));
}

#[test]
fn ram_conforms() {
    for uri in ["ram:4MiB", "ram:4MiB?block_size=512", "ram:4MiB?populate=yes"] {
        let device = open(uri).expect("ram opens");
        block_on(conformance(device));
    }
}

#[test]
fn uring_conforms() {
    let dir = disk_dir();
    for (name, options) in [("a", "size=4MiB"), ("b", "size=4MiB&block_size=512")] {
        let path = dir.path().join(name);
        let device = open(&format!("uring:{}?{options}", path.display())).expect("uring creates the file");
        on_reactor(move || conformance(device));
    }
}

#[test]
fn uring_keeps_many_operations_in_flight_and_survives_dropped_futures() {
    let dir = disk_dir();
    let uri = format!("uring:{}?size=64MiB", dir.path().join("many").display());
    let device = open(&uri).expect("uring creates the file");
    let keep = device.clone();
    on_reactor(move || async move {
        let done = std::rc::Rc::new(std::cell::Cell::new(0));
        for index in 0..2000u64 {
            let (device, done) = (device.clone(), done.clone());
            crate::reactor::spawn(async move {
                let data = pattern(4096, index as u8).freeze();
                device.write(index * 8192, data).await.expect("write");
                done.set(done.get() + 1);
            });
        }
        while done.get() < 2000 {
            // Started, polled once, dropped: the operation must outlive it.
            let dropped = device.write(4096, pattern(4096, 9).freeze());
            let now = crate::reactor::now();
            let _ = crate::reactor::with_deadline(now, dropped).await;
            crate::reactor::yield_now().await;
        }
        for index in 0..2000u64 {
            let (result, back) = device.read(index * 8192, DmaBuf::uninit(4096)).await;
            result.expect("read");
            assert_eq!(back[..], pattern(4096, index as u8)[..], "block {index}");
        }
    });
    drop(keep);
    open(&uri).expect("nothing holds the file any more");
}

#[test]
fn a_reactor_that_stops_lets_operations_in_flight_complete() {
    let dir = disk_dir();
    let uri = format!("uring:{}?size=64MiB", dir.path().join("stop").display());
    let device = open(&uri).expect("uring creates the file");
    let reactors = Reactors::start(ReactorConfig::default()).expect("a reactor starts");
    let begun = reactors.handles()[0].call(move || async move {
        for index in 0..256 {
            let device = device.clone();
            let data = pattern(128 << 10, index as u8).freeze();
            crate::reactor::spawn(async move {
                let _ = device.write(index * (128 << 10), data).await;
            });
        }
        crate::reactor::yield_now().await;
    });
    block_on(begun).expect("the reactor lives");
    reactors.shutdown();
    open(&uri).expect("the file is closed and unlocked when the reactor has stopped");
}

#[test]
fn a_file_in_use_is_refused_until_it_is_closed() {
    let dir = disk_dir();
    let path = dir.path().join("locked");
    let uri = format!("uring:{}?size=1MiB", path.display());
    let first = open(&uri).expect("the first one gets it");
    let error = open(&uri).expect_err("the second one does not").to_string();
    assert!(error.contains("another Rimrock"), "{error}");
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    drop(first);
    open(&uri).expect("free again");
}

#[test]
fn files_are_created_sparse_and_reopened_with_or_without_a_size() {
    let dir = disk_dir();
    let path = dir.path().join("sparse");
    let uri = format!("uring:{}", path.display());
    let device = open(&format!("{uri}?size=1GiB")).expect("created");
    assert_eq!(device.info().size, 1 << 30);
    assert!(device.info().write_cache);
    assert_eq!(device.info().name, "sparse");
    drop(device);
    let metadata = fs::metadata(&path).expect("the file is there");
    assert_eq!(metadata.len(), 1 << 30);
    assert!(metadata.blocks() * 512 < 1 << 20, "{} blocks", metadata.blocks());
    assert_eq!(metadata.mode() & 0o777, 0o600);
    assert_eq!(open(&uri).expect("reopened").info().size, 1 << 30);
    assert!(matches!(open(&format!("{uri}?size=2GiB")), Err(DeviceError::Smaller { .. })));
}

#[test]
fn discard_gives_a_files_space_back() {
    let dir = disk_dir();
    let path = dir.path().join("punched");
    let device = open(&format!("uring:{}?size=4MiB", path.display())).expect("created");
    let blocks = move || fs::metadata(&path).expect("the file is there").blocks() * 512;
    on_reactor(move || async move {
        device.write(0, pattern(4 << 20, 3).freeze()).await.expect("write");
        device.flush().await.expect("flush");
        assert!(blocks() >= 4 << 20);
        device.discard(0, 4 << 20).await.expect("discard");
        assert!(blocks() < 1 << 20);
    });
}

#[test]
fn what_cannot_be_opened_is_refused_with_its_reason() {
    let dir = disk_dir();
    let at = |name: &str| format!("uring:{}", dir.path().join(name).display());
    fs::write(dir.path().join("tiny"), b"x").expect("a tiny file");
    let cases: Vec<(String, &str)> = vec![
        ("uring:relative/path?size=1GiB".into(), "not an absolute path"),
        (at("missing"), "add ?size=SIZE"),
        (at("no/such/dir?size=1GiB"), "create it first"),
        (format!("uring:{}", dir.path().display()), "is a directory"),
        ("uring:/dev/null".into(), "neither a regular file nor a block device"),
        (at("tiny"), "less than one block"),
        (at("tiny?size=1MiB"), "less than size=1048576"),
        (at("odd?size=1000001"), "whole number of blocks"),
        (at("x?size=1Zi"), "unknown unit"),
        (at("x?size=0"), "is zero"),
        (at("x?block_size=1024"), "expected 512 or 4096"),
        (at("x?size=1MiB&size=2MiB"), "given twice"),
        (at("x?colour=red"), "unknown option 'colour'"),
        ("floppy:a".into(), "unknown kind"),
        ("ram".into(), "not a device URI"),
        ("ram:".into(), "not a device URI"),
        ("ram:1MiB?size=2".into(), "unknown option 'size'"),
        ("ram:1MiB?populate=maybe".into(), "expected yes or no"),
        ("ram:8EiB".into(), "unknown unit"),
        ("ram:4095P".into(), "cannot map"),
    ];
    for (uri, part) in cases {
        let error = open(&uri).expect_err(&uri).to_string();
        assert!(error.contains(part), "{uri}: {error}");
    }
    for name in ["odd", "x"] {
        assert!(!dir.path().join(name).exists(), "a refused open must not leave {name} behind");
    }
}

#[test]
fn read_only_devices_refuse_writes_and_may_be_shared() {
    let dir = disk_dir();
    let uri = format!("uring:{}", dir.path().join("shared").display());
    drop(open(&format!("{uri}?size=1MiB")).expect("created"));
    let read_only = || Device::open(&uri, OpenOptions { read_only: true });
    let (first, _second) = (read_only().expect("first"), read_only().expect("second"));
    assert!(matches!(open(&uri), Err(DeviceError::Locked { .. })));
    let written = block_on(async move { first.write(0, DmaBuf::zeroed(4096).freeze()).await });
    assert_eq!(written, Err(IoError::WriteProtected));
}

#[test]
fn using_a_file_outside_of_a_reactor_is_an_error() {
    let dir = disk_dir();
    let device = open(&format!("uring:{}?size=1MiB", dir.path().join("f").display())).expect("created");
    let (result, buf) = block_on(async move { device.read(0, DmaBuf::zeroed(4096)).await });
    assert!(matches!(result, Err(IoError::Internal(_))));
    assert_eq!(buf.len(), 4096);
}

#[test]
fn a_ram_device_can_be_copied_damaged_and_reopened() {
    let device = open("ram:1MiB").expect("ram opens");
    let image = block_on(async move {
        device.write(8192, pattern(4096, 5).freeze()).await.expect("write");
        device.image().expect("ram has an image")
    });
    let mut damaged = image.clone();
    damaged[8192] ^= 1;
    let device = Device::ram_from_image(&damaged, 4096).expect("reopened");
    let (_, back) = block_on(async move { device.read(8192, DmaBuf::uninit(4096)).await });
    assert_eq!(back[0] ^ 1, image[8192]);
    assert_eq!(back[1..], image[8193..12288]);
}

#[test]
fn block_devices_that_are_mounted_are_refused() {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("the list of mounts");
    let mounted = mounts
        .lines()
        .filter_map(|line| line.split(' ').next())
        .map(PathBuf::from)
        .find(|path| path.starts_with("/dev") && fs::File::open(path).is_ok() && path.exists());
    let Some(mounted) = mounted else { return };
    let is_block = std::os::unix::fs::FileTypeExt::is_block_device(
        &fs::metadata(&mounted).expect("it is there").file_type(),
    );
    if !is_block {
        return;
    }
    let error = open(&format!("uring:{}", mounted.display())).expect_err("a mounted device").to_string();
    assert!(error.contains("is in use (mounted at /"), "{error}");
}
