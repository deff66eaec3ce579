//! Rows of written chunks beyond the ranges in the inode.
//!
//! A tree of bitmaps. A bit of level 0 is a chunk. A bit of a higher level is a full page of the
//! level below, which then has no row. So a range of any length changes at most two rows per level,
//! and a file that is written completely has very few rows.

mod shown;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use threefs_core::ids::InodeId;
use threefs_kv::{KeyRange, KvError, Transaction};

use crate::ops::history::Owner;
use crate::ops::{OpError, epoch, history, view};
use crate::protocol::{MetaError, WrittenCursor};
use crate::rows;
use crate::rows::history as keys;
use crate::written::Written;
use crate::written::page::{PAGE_BITS, PAGE_SHIFT, Page};

/// 4,096 cubed exceeds the number of chunks of a file.
const LEVELS: u8 = 3;

/// Adds ranges. If the store is `full`, new ranges are refused, and the transaction must not be
/// committed.
pub(crate) async fn add(
    txn: &mut Transaction,
    file: Owner,
    written: &Written,
    full: Option<&MetaError>,
) -> Result<(), OpError> {
    for (first, last) in written.iter() {
        add_range(txn, file, u64::from(first), u64::from(last) + 1, full).await?;
    }
    Ok(())
}

async fn add_range(
    txn: &mut Transaction,
    file: Owner,
    first: u64,
    end: u64,
    full: Option<&MetaError>,
) -> Result<(), OpError> {
    let (mut first, mut end) = (first, end);
    for level in 0..LEVELS {
        let whole = first.next_multiple_of(PAGE_BITS).min(end);
        let rest = end - end % PAGE_BITS;
        if first < whole {
            mark(txn, file, level, first, whole, full).await?;
        }
        if whole <= rest && rest < end {
            mark(txn, file, level, rest, end, full).await?;
        }
        if whole >= rest {
            return Ok(());
        }
        (first, end) = (whole / PAGE_BITS, rest / PAGE_BITS);
        clear_pages(txn, file, level, first, end).await?;
    }
    Ok(())
}

/// Sets bits of one page, unless the whole page is set already; a page that becomes full sets a bit
/// of the next level.
async fn mark(
    txn: &mut Transaction,
    file: Owner,
    level: u8,
    first: u64,
    end: u64,
    full: Option<&MetaError>,
) -> Result<(), OpError> {
    if is_set(txn, file.id, level + 1, first / PAGE_BITS).await? {
        return Ok(());
    }
    let (mut level, mut first, mut end) = (level, first, end);
    loop {
        let number = first / PAGE_BITS;
        let before = read(txn, file.id, level, first).await?;
        let mut page = before.clone();
        page.set(first % PAGE_BITS, end - number * PAGE_BITS);
        if page == before {
            return Ok(());
        }
        if let Some(full) = full {
            return Err(full.clone().into());
        }
        if !page.is_full() || level + 1 >= LEVELS {
            return write(txn, file, level, number, Some(&page)).await;
        }
        write(txn, file, level, number, None).await?;
        (level, first, end) = (level + 1, number, number + 1);
    }
}

/// Removes all chunks from `chunks` on.
pub(crate) async fn cut(txn: &mut Transaction, file: Owner, chunks: u64) -> Result<(), OpError> {
    if chunks > u64::from(u32::MAX) {
        return Ok(());
    }
    let mut split_range = None;
    for level in 0..LEVELS {
        let shift = PAGE_SHIFT * u32::from(level);
        let unit = chunks >> shift;
        clear_pages(txn, file, level, unit / PAGE_BITS + 1, PAGE_BITS * PAGE_BITS).await?;
        let mut page = read(txn, file.id, level, unit).await?;
        if page.is_empty() {
            continue;
        }
        // A full page of which only the first part stays.
        if page.contains(unit % PAGE_BITS) && unit << shift < chunks {
            split_range = Some((unit << shift, chunks));
        }
        page.clear_from(unit % PAGE_BITS);
        let page = Some(&page).filter(|page| !page.is_empty());
        write(txn, file, level, unit / PAGE_BITS, page).await?;
    }
    if let Some((first, end)) = split_range {
        add_range(txn, file, first, end, None).await?;
    }
    Ok(())
}

/// Writes or clears a page.
async fn write(
    txn: &mut Transaction,
    file: Owner,
    level: u8,
    number: u64,
    page: Option<&Page>,
) -> Result<(), OpError> {
    let key = rows::written(file.id, level, number);
    history::keep_value(txn, file, &key, keys::former_page(&key)).await?;
    match page {
        Some(page) => txn.set(&key, page.encode()),
        None => txn.clear(&key),
    }
    Ok(())
}

/// Clears the pages of a level from `first` up to `end`.
async fn clear_pages(
    txn: &mut Transaction,
    file: Owner,
    level: u8,
    first: u64,
    end: u64,
) -> Result<(), OpError> {
    let range = pages(file.id, level, first, end);
    if epoch::epoch(txn, file.volume).await?.count > 0 {
        for (key, _) in txn.range(&range, usize::MAX).await? {
            history::keep_value(txn, file, &key, keys::former_page(&key)).await?;
        }
    }
    txn.clear_range(range);
    Ok(())
}

/// Removes all rows.
pub(crate) fn clear(txn: &mut Transaction, inode: InodeId) {
    txn.clear_range(KeyRange::prefix(&rows::written_of(inode)));
}

/// Those of `chunks` that are in the rows.
pub(crate) async fn written_among(
    txn: &mut Transaction,
    inode: InodeId,
    chunks: &[u32],
) -> Result<Written, KvError> {
    let mut pages: BTreeMap<(u8, u64), Page> = BTreeMap::new();
    let mut written = Written::default();
    for chunk in chunks {
        for level in 0..LEVELS {
            let unit = u64::from(*chunk) >> (PAGE_SHIFT * u32::from(level));
            let page_key = (level, unit / PAGE_BITS);
            let page = match pages.entry(page_key) {
                Entry::Occupied(page) => page.into_mut(),
                Entry::Vacant(page) => page.insert(read(txn, inode, level, unit).await?),
            };
            if page.contains(unit % PAGE_BITS) {
                written.add(*chunk, *chunk);
                break;
            }
        }
    }
    Ok(written)
}

/// The chunks of some pages that follow a place, at most `ranges_max` ranges, and the place of the last
/// page if more may follow.
pub(crate) async fn page_after(
    txn: &mut Transaction,
    inode: InodeId,
    after: Option<WrittenCursor>,
    ranges_max: usize,
) -> Result<(Written, Option<WrittenCursor>), KvError> {
    // A page has at most half as many ranges as bits.
    let pages_max = ranges_max / (PAGE_BITS as usize / 2);
    if view::split(inode).is_some() {
        return shown::page_after(txn, inode, after, pages_max).await;
    }
    let mut range = KeyRange::prefix(&rows::written_of(inode));
    if let Some(WrittenCursor { level, page }) = after {
        range = range.after(&rows::written(inode, level, u64::from(page)));
    }
    let (mut written, mut next) = (Written::default(), None);
    let found = txn.snapshot_range(&range, pages_max).await?;
    for (key, value) in &found {
        let place = place_of_key(key)?;
        let page = Page::decode(value).ok_or_else(|| not_a_page(key))?;
        add_chunks(&mut written, place, &page);
        next = Some(place);
    }
    Ok((written, next.filter(|_| found.len() == pages_max)))
}

fn not_a_page(key: &[u8]) -> KvError {
    KvError::bad_row(key, "not a page of chunks")
}

/// The place of a page, current or former.
fn place_of_key(key: &[u8]) -> Result<WrittenCursor, KvError> {
    match *key.get(12..).unwrap_or_default() {
        [level, a, b, c, d, ..] => {
            Ok(WrittenCursor { level, page: u32::from_be_bytes([a, b, c, d]) })
        }
        _ => Err(not_a_page(key)),
    }
}

/// Adds the chunks of a page.
fn add_chunks(written: &mut Written, place: WrittenCursor, page: &Page) {
    let base = u64::from(place.page) * PAGE_BITS;
    let shift = PAGE_SHIFT * u32::from(place.level);
    for (first, end) in page.runs() {
        // The last chunk of a full page of the highest level has the highest index.
        let chunk = |at: u64| u32::try_from(at).unwrap_or(u32::MAX);
        written.add(chunk((base + first) << shift), chunk(((base + end) << shift) - 1));
    }
}

/// Whether a bit is set, or a bit of a higher level that covers it.
async fn is_set(
    txn: &mut Transaction,
    inode: InodeId,
    level: u8,
    unit: u64,
) -> Result<bool, KvError> {
    let mut unit = unit;
    for level in level..LEVELS {
        if read(txn, inode, level, unit).await?.contains(unit % PAGE_BITS) {
            return Ok(true);
        }
        unit /= PAGE_BITS;
    }
    Ok(false)
}

/// The page that contains a bit.
async fn read(
    txn: &mut Transaction,
    inode: InodeId,
    level: u8,
    unit: u64,
) -> Result<Page, KvError> {
    let (raw, number) = (view::raw(inode), unit / PAGE_BITS);
    let key = rows::written(raw, level, number);
    let value = match view::split(inode) {
        None => txn.get(&key).await?,
        Some((snapshot, raw)) => {
            view::value(txn, snapshot, raw, &key, &keys::former_page(&key)).await?
        }
    };
    match value {
        None => Ok(Page::empty()),
        Some(value) => Page::decode(&value).ok_or_else(|| not_a_page(&key)),
    }
}

/// Rows of a level, for the pages from `first` up to `end`.
fn pages(inode: InodeId, level: u8, first: u64, end: u64) -> KeyRange {
    KeyRange::new(rows::written(inode, level, first), rows::written(inode, level, end))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use threefs_kv::Store;

    use super::*;

    const FILE: InodeId = InodeId(7);
    const OWNER: Owner = Owner { id: FILE, volume: None, since: 0 };

    /// Chunks around the page boundaries of every level.
    fn chunk() -> impl Strategy<Value = u32> {
        let unit = prop_oneof![Just(1u64), Just(64), Just(PAGE_BITS), Just(PAGE_BITS * PAGE_BITS)];
        (unit, 0..256u64, -2i64..=2).prop_map(|(unit, times, off)| {
            (unit * times).saturating_add_signed(off).min(u64::from(u32::MAX)) as u32
        })
    }

    /// Rows of pages that a higher level marks as full.
    async fn superfluous(txn: &mut Transaction) -> usize {
        let mut count = 0;
        for (key, _) in txn.range(&KeyRange::prefix(&rows::written_of(FILE)), 10_000).await.unwrap()
        {
            let page = u64::from(u32::from_be_bytes(key[13..].try_into().unwrap()));
            count += usize::from(is_set(txn, FILE, key[12] + 1, page).await.unwrap());
        }
        count
    }

    async fn follow(steps: Vec<(u32, u32, bool)>) {
        let store = Store::memory();
        let mut model = Written::default();
        let mut probes: Vec<u32> = vec![0, u32::MAX];
        for (first_end, other, cuts) in steps {
            let (first, last) = (first_end.min(other), first_end.max(other));
            let mut txn = store.begin().await.unwrap();
            if cuts {
                cut(&mut txn, OWNER, u64::from(last)).await.unwrap();
                model.cut(u64::from(last), 1);
            } else {
                let mut written = Written::default();
                written.add(first, last);
                add(&mut txn, OWNER, &written, None).await.unwrap();
                model.add(first, last);
            }
            txn.commit().await.unwrap();
            for probe in [first, last] {
                probes.extend([probe.saturating_sub(1), probe, probe.saturating_add(1)]);
            }
            let mut txn = store.begin().await.unwrap();
            let written = written_among(&mut txn, FILE, &probes).await.unwrap();
            for probe in &probes {
                assert_eq!(written.contains(*probe), model.contains(*probe), "chunk {probe}");
            }
            assert_eq!(superfluous(&mut txn).await, 0);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn rows_contain_exactly_the_chunks_added_and_not_truncated_since(
            steps in prop::collection::vec((chunk(), chunk(), prop::bool::weighted(0.3)), 1..12),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(follow(steps));
        }
    }

    #[tokio::test]
    async fn a_completely_written_file_has_one_row_in_any_write_order() {
        let store = Store::memory();
        let mut txn = store.begin().await.unwrap();
        for number in 0..3 * PAGE_BITS {
            // 5 and three pages have no common divisor.
            let chunk = number * 5 % (3 * PAGE_BITS);
            add_range(&mut txn, OWNER, chunk, chunk + 1, None).await.unwrap();
        }
        let all = KeyRange::prefix(&rows::written_of(FILE));
        assert_eq!(txn.range(&all, 10).await.unwrap().len(), 1);
        add_range(&mut txn, OWNER, 0, 1 << 32, None).await.unwrap();
        let rows = txn.range(&all, 10).await.unwrap();
        assert_eq!(rows.len(), 1, "a file of maximum length");
        assert_eq!(rows[0].1.len(), 4);
    }
}
