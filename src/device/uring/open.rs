//! Opening a file or block device: creating, checking, locking.

#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::statfs::fstatfs;
use uuid::Uuid;

use super::{SAFE_ALIGN, Uring};
use crate::device::{DeviceError, DeviceInfo, DeviceKind, DeviceUri};
use crate::memory::DmaBuf;
use crate::reactor::ring::RingFile;

/// Opens `uring:/path?size=SIZE&block_size=512|4096`. A file that is missing is created, sparse, when `size`
/// is given.
pub(in crate::device) fn open(uri: &DeviceUri, read_only: bool) -> Result<(DeviceInfo, Uring), DeviceError> {
    uri.only("size, block_size")?;
    let path = PathBuf::from(&uri.address);
    let asked = Asked {
        size: uri.option("size").map(|text| uri.size(text)).transpose()?,
        block_size: uri.block_size()?,
        read_only,
    };
    if !path.is_absolute() {
        return Err(DeviceError::NotAbsolute { path });
    }
    let store = match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => return Err(DeviceError::IsDirectory { path }),
        Ok(metadata) if metadata.file_type().is_block_device() => {
            open_block_device(&path, &asked, metadata.rdev())?
        }
        Ok(metadata) if metadata.is_file() => open_file(&path, &asked)?,
        Ok(_) => return Err(DeviceError::NotAFile { path }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => create(uri, &path, &asked)?,
        Err(source) => return Err(DeviceError::Open { path, source }),
    };
    uri.whole_blocks(store.size, asked.block_size)?;
    let memory_align = probe(&store.file, &path, asked.block_size)?;
    let info = DeviceInfo {
        uri: uri.text.clone(),
        name: path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        kind: DeviceKind::Uring,
        block_size: asked.block_size,
        size: store.size,
        write_cache: store.write_cache,
        atomic_bytes: store.atomic_bytes,
        uuid: Uuid::new_v4(),
    };
    let uring = Uring::new(RingFile::new(store.file.into()), asked.block_size, memory_align);
    if !store.can_discard {
        uring.refuse_discards();
    }
    Ok((info, uring))
}

struct Asked {
    size: Option<u64>,
    block_size: u32,
    read_only: bool,
}

struct Store {
    file: File,
    size: u64,
    write_cache: bool,
    atomic_bytes: u32,
    can_discard: bool,
}

fn direct(asked: &Asked) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(!asked.read_only).custom_flags(libc::O_DIRECT);
    options
}

fn open_file(path: &Path, asked: &Asked) -> Result<Store, DeviceError> {
    let file = direct(asked).open(path).map_err(|error| open_error(path, error))?;
    lock(&file, path, asked)?;
    let metadata = file.metadata().map_err(|source| DeviceError::Open { path: path.to_owned(), source })?;
    file_store(file, path, metadata.len(), asked)
}

/// A locked regular file as a store, set to its size if it is still empty.
fn file_store(file: File, path: &Path, len: u64, asked: &Asked) -> Result<Store, DeviceError> {
    let path = || path.to_owned();
    let size = match asked.size {
        Some(size) if len == 0 && !asked.read_only => {
            file.set_len(size).map_err(|source| DeviceError::SetSize { path: path(), size, source })?;
            size
        }
        Some(size) if len < size => return Err(DeviceError::Smaller { path: path(), size, actual: len }),
        Some(size) => size,
        None => len - len % u64::from(asked.block_size),
    };
    if size == 0 {
        return Err(DeviceError::TooSmall { path: path(), actual: len, block_size: asked.block_size });
    }
    // What tears below a file is not known; a sector is what every drive keeps whole.
    Ok(Store { file, size, write_cache: true, atomic_bytes: 512, can_discard: true })
}

fn create(uri: &DeviceUri, path: &Path, asked: &Asked) -> Result<Store, DeviceError> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    if !parent.is_dir() {
        return Err(DeviceError::NoParent { path: path.to_owned(), parent: parent.to_owned() });
    }
    let Some(size) = asked.size.filter(|_| !asked.read_only) else {
        return Err(DeviceError::Missing { path: path.to_owned() });
    };
    uri.whole_blocks(size, asked.block_size)?;
    let made = direct(asked).create_new(true).mode(0o600).open(path);
    if let Err(error) = &made {
        if error.kind() == io::ErrorKind::AlreadyExists {
            return Err(DeviceError::Locked { path: path.to_owned(), holders: holders(path) });
        }
        // A filesystem without O_DIRECT has made the file before it refuses.
        if error.raw_os_error() == Some(libc::EINVAL) {
            let reason = open_error(path, io::Error::from_raw_os_error(libc::EINVAL));
            let _ = std::fs::remove_file(path);
            return Err(reason);
        }
    }
    let file = made.map_err(|error| open_error(path, error))?;
    let store = lock(&file, path, asked).and_then(|()| file_store(file, path, 0, asked));
    let synced = store.and_then(|store| match sync_new(&store.file, parent) {
        Ok(()) => Ok(store),
        Err(source) => Err(DeviceError::Open { path: path.to_owned(), source }),
    });
    if synced.is_err() {
        let _ = std::fs::remove_file(path);
    }
    synced
}

/// Makes a new file's size and name durable.
fn sync_new(file: &File, parent: &Path) -> io::Result<()> {
    file.sync_all()?;
    File::open(parent)?.sync_all()
}

fn open_block_device(path: &Path, asked: &Asked, device_number: u64) -> Result<Store, DeviceError> {
    let mut options = direct(asked);
    options.custom_flags(libc::O_DIRECT | libc::O_EXCL);
    let mut file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => DeviceError::InUse { path: path.to_owned(), mounts: mounts(path) },
        _ => open_error(path, error),
    })?;
    lock(&file, path, asked)?;
    let len =
        file.seek(SeekFrom::End(0)).map_err(|source| DeviceError::Open { path: path.to_owned(), source })?;
    let queue = Queue::of(device_number);
    let sector = queue.number("logical_block_size").unwrap_or(512);
    if asked.block_size < sector {
        return Err(DeviceError::BlockTooSmall { path: path.to_owned(), block_size: asked.block_size });
    }
    let size = match asked.size {
        Some(size) if len < size => {
            return Err(DeviceError::Smaller { path: path.to_owned(), size, actual: len });
        }
        Some(size) => size,
        None => len - len % u64::from(asked.block_size),
    };
    if size == 0 {
        return Err(DeviceError::TooSmall {
            path: path.to_owned(),
            actual: len,
            block_size: asked.block_size,
        });
    }
    let write_cache = queue.text("write_cache").is_none_or(|text| text != "write through");
    // Holes are punched by the device's Write Zeroes; one that has none refuses.
    let can_discard = queue.number("write_zeroes_max_bytes") != Some(0);
    Ok(Store { file, size, write_cache, atomic_bytes: sector, can_discard })
}

/// A block device's attributes in sysfs.
struct Queue {
    dir: Option<PathBuf>,
}

impl Queue {
    fn of(device_number: u64) -> Queue {
        let (major, minor) = (libc::major(device_number), libc::minor(device_number));
        let base = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // A partition's queue is its disk's.
        let dir = [base.join("queue"), base.join("../queue")].into_iter().find(|dir| dir.is_dir());
        Queue { dir }
    }

    fn text(&self, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.dir.as_ref()?.join(name)).ok()?;
        Some(text.trim().to_owned())
    }

    fn number(&self, name: &str) -> Option<u32> {
        self.text(name)?.parse().ok()
    }
}

/// How long a lock may outlive its process: the kernel ends a killed process's operations in its own time.
const AFTERLIFE: Duration = Duration::from_secs(5);

/// Takes an open-file-description lock on the whole file, which lives as long as the last descriptor or
/// operation that uses it. Readers share. A lock that no living process holds is waited for.
fn lock(file: &File, path: &Path, asked: &Asked) -> Result<(), DeviceError> {
    let kind = if asked.read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    let range =
        libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 0, l_pid: 0 };
    let started = Instant::now();
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&range)) {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN | Errno::EACCES) => {
                let holders = holders(path);
                if !holders.is_empty() || started.elapsed() > AFTERLIFE {
                    return Err(DeviceError::Locked { path: path.to_owned(), holders });
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(errno) => return Err(DeviceError::Lock { path: path.to_owned(), source: errno }),
        }
    }
}

/// Who has the file open more than this call does, as far as this process may see: `process 17 (rimrock)`.
fn holders(path: &Path) -> String {
    let Ok(path) = path.canonicalize() else { return String::new() };
    let Ok(processes) = std::fs::read_dir("/proc") else { return String::new() };
    let mut found = Vec::new();
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fd")) else { continue };
        let links = descriptors.flatten().map(|entry| std::fs::read_link(entry.path()));
        let open = links.filter(|link| link.as_ref().is_ok_and(|link| *link == path)).count();
        let own = usize::from(pid == std::process::id());
        if open > own {
            let command = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push(format!("process {pid} ({})", command.trim()));
        }
    }
    found.join(", ")
}

/// Where a block device is mounted, for an error text.
fn mounts(path: &Path) -> String {
    let Ok(path) = path.canonicalize() else { return String::new() };
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let entries = table.lines().filter_map(|line| {
        let mut words = line.split(' ');
        (Path::new(words.next()?).canonicalize().ok()? == path).then(|| words.next())?
    });
    entries.collect::<Vec<_>>().join(", ")
}

fn open_error(path: &Path, error: io::Error) -> DeviceError {
    let path = path.to_owned();
    match error.raw_os_error() {
        Some(libc::EINVAL) => {
            let filesystem = filesystem(&path);
            DeviceError::NoDirect { path, filesystem }
        }
        _ => DeviceError::Open { path, source: error },
    }
}

/// The type of the filesystem that holds `path`, or its magic number.
fn filesystem(path: &Path) -> String {
    const KNOWN: &[(i64, &str)] = &[
        (libc::TMPFS_MAGIC, "tmpfs"),
        (libc::OVERLAYFS_SUPER_MAGIC, "overlayfs"),
        (libc::EXT4_SUPER_MAGIC, "ext4"),
        (libc::XFS_SUPER_MAGIC, "xfs"),
        (libc::BTRFS_SUPER_MAGIC, "btrfs"),
        (libc::NFS_SUPER_MAGIC, "nfs"),
        (libc::FUSE_SUPER_MAGIC, "fuse"),
        (libc::PROC_SUPER_MAGIC, "proc"),
        (libc::SYSFS_MAGIC, "sysfs"),
        (0x0102_1997, "9p"),
        (0x8584_58f6, "ramfs"),
        (0x2fc1_2fc1, "zfs"),
        (0x7371_7368, "squashfs"),
    ];
    let Ok(Ok(stat)) = File::open(path).map(|file| fstatfs(&file)) else { return "unknown".to_owned() };
    let magic = stat.filesystem_type().0;
    match KNOWN.iter().find(|(known, _)| *known == magic) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("of type {magic:#x}"),
    }
}

/// Reads the first block directly, to learn whether transfers of a block work at all and how memory must
/// be aligned for them.
fn probe(file: &File, path: &Path, block_size: u32) -> Result<usize, DeviceError> {
    let len = block_size as usize;
    let mut buf = DmaBuf::zeroed(SAFE_ALIGN + len);
    // 4: what drives ask for; 512: what the block layer asks for by default.
    for align in [4, 512] {
        if file.read_at(&mut buf[align..align + len], 0).is_ok() {
            return Ok(align);
        }
    }
    match file.read_at(&mut buf[..len], 0) {
        Ok(_) => Ok(SAFE_ALIGN),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Err(DeviceError::BlockTooSmall { path: path.to_owned(), block_size })
        }
        Err(source) => Err(DeviceError::Open { path: path.to_owned(), source }),
    }
}
