//! Progress of a chunk at a node: reduce, send, publish, retire.

use super::*;

impl TreeCore {
    pub(super) fn release(&mut self, link: usize, class: usize, slot: Option<u32>) {
        let link = &mut self.links[link];
        link.receive[class].release(slot);
        link.returns[class] += 1;
    }

    pub(super) fn advance(&mut self, at: usize) {
        let state = &self.chunks[at];
        let (key, chunk) = (state.key, state.chunk);
        let ready = !state.needs_local || state.local_ready;
        if !state.reduced && state.needs_local && ready && state.missing == 0 {
            self.reduce(at);
            let toward = self.flow(&self.chunks[at]).toward;
            self.chunks[at].reduced = true;
            match toward {
                Some(link) => self.send_ready(link, key, class(chunk.tree, Stage::Up)),
                None => self.chunks[at].result = true,
            }
        }
        if self.chunks[at].result {
            self.publish(at);
        }
        self.finish(at);
    }

    fn reduce(&mut self, at: usize) {
        let state = &self.chunks[at];
        let (key, class) = (state.key, class(state.chunk.tree, Stage::Up));
        let partials: Vec<Partial> = self
            .flow(state)
            .away
            .iter()
            .zip(state.partials)
            .filter_map(|(link, slot)| slot.map(|slot| Partial { link: *link, class, slot }))
            .collect();
        for partial in &partials {
            self.release(partial.link, partial.class, Some(partial.slot));
        }
        self.actions.push_back(Action::Reduce { key, partials });
    }

    fn publish(&mut self, at: usize) {
        let state = &self.chunks[at];
        let (key, class) = (state.key, class(state.chunk.tree, Stage::Down));
        self.actions.push_back(Action::Publish { key });
        let mut links = [None; NEIGHBOURS_MAX];
        for (place, link) in links.iter_mut().zip(state.onward.links(self.flow(state))) {
            *place = Some(*link);
        }
        for link in links.into_iter().flatten() {
            self.send_ready(link, key, class);
        }
    }

    fn send_ready(&mut self, link: usize, key: Key, class: usize) {
        self.links[link].send[class].ready(key);
        self.pump(link, class);
    }

    pub(super) fn pump(&mut self, link: usize, class: usize) {
        let (tree, stage) =
            (class / 2, if class.is_multiple_of(2) { Stage::Up } else { Stage::Down });
        while let Some(key) = self.links[link].send[class].take_next() {
            self.actions.push_back(Action::Send { link, key, tree, stage });
        }
    }

    pub(super) fn finish(&mut self, at: usize) {
        let state = &self.chunks[at];
        let comes_by = state.onward != Onward::Nowhere;
        let settled = if comes_by { state.result } else { state.reduced };
        if settled && state.sends_left == 0 {
            let key = state.key;
            self.chunks.remove(at);
            self.actions.push_back(Action::Done { key });
        }
    }
}
