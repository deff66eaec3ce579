//! Spread of a failed node's load over the others: local search over chains without data.

use super::layout::Layout;
use super::{Placement, Rule, Use};

/// Swaps that the search examines.
pub(crate) const SWAPS_MAX: usize = 2_000_000;

/// A replica that may be exchanged: row and node.
pub(super) type Place = (usize, usize);

/// Exchanges the nodes of these places while that makes the pairs of nodes more even. The loads of
/// the nodes do not change.
pub(super) fn spread(layout: &mut Layout, places: &mut [Place], swaps_max: usize) {
    let mut examined = 0;
    loop {
        let mut improved = false;
        for index in 0..places.len() {
            let (row, node) = places[index];
            if !is_crowded(layout, row, node) {
                continue;
            }
            if examined > swaps_max {
                return;
            }
            examined += places.len();
            let change = |other: &usize| change(layout, (row, node), places[*other]);
            let best = (0..places.len())
                .filter(|other| {
                    change(other) < 0 && may_swap(layout, places[index], places[*other])
                })
                .min_by_key(change);
            let Some(other) = best else { continue };
            let (other_row, other_node) = places[other];
            layout.leave(row, node);
            layout.leave(other_row, other_node);
            layout.join(row, other_node);
            layout.join(other_row, node);
            (places[index].1, places[other].1) = (other_node, node);
            improved = true;
        }
        if !improved {
            return;
        }
    }
}

/// Whether the node shares several chains with another one of this chain.
fn is_crowded(layout: &Layout, row: usize, node: usize) -> bool {
    layout.rows[row].nodes.iter().any(|peer| *peer != node && layout.pair(node, *peer) > 1)
}

fn may_swap(layout: &Layout, (row, node): Place, (other_row, other_node): Place) -> bool {
    row != other_row
        && layout.rows[row].size == layout.rows[other_row].size
        && layout.fits(row, Some(node), other_node)
        && layout.fits(other_row, Some(other_node), node)
}

/// Change of the cost of pairs by an exchange. Peers that both chains have make no difference.
fn change(layout: &Layout, (one, a): Place, (other, b): Place) -> i64 {
    let (ours, theirs) = (&layout.rows[one].nodes, &layout.rows[other].nodes);
    let moved = |peers: &[usize], others: &[usize], from: usize, to: usize| -> i64 {
        let peers = peers.iter().filter(|peer| **peer != from && !others.contains(peer));
        peers.map(|peer| layout.exchange_cost(*peer, Some(from), to)).sum()
    };
    moved(ours, theirs, a, b) + moved(theirs, ours, b, a)
}

/// The largest share of a failed node's load that one other node gets, over all nodes, relative to
/// an even spread: in proportion to the loads of all nodes that may share a chain with it. 1 if
/// nothing fails over.
pub(crate) fn worst_share(placement: &Placement, rule: &Rule) -> f64 {
    let layout = Layout::new(placement, rule);
    let stays = |node: &usize| layout.states[*node] != Use::Leaving && layout.loads[*node] > 0;
    let nodes: Vec<usize> = (0..layout.ids.len()).filter(stays).collect();
    let mut worst: f64 = 1.0;
    for failed in &nodes {
        let peers = || nodes.iter().filter(|node| !layout.are_exclusive(**node, *failed));
        let load: u64 = peers().map(|node| layout.loads[*node]).sum();
        let shared: u64 = peers().map(|node| layout.pair(*failed, *node)).sum();
        if shared == 0 {
            continue;
        }
        for node in peers() {
            let even = shared as f64 * layout.loads[*node] as f64 / load as f64;
            worst = worst.max(layout.pair(*failed, *node) as f64 / even);
        }
    }
    worst
}
