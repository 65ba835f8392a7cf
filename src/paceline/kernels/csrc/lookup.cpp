// Drafts by n-gram and suffix lookup: what followed the latest occurrences of a text's end. draft/text_index.py makes the
// same drafts in Python.
#include "text_index.h"

#include <new>

namespace {

constexpr size_t NGRAM_OCCURRENCES = 4;    // latest occurrences of an n-gram that are drafted from
constexpr size_t NGRAM_BRANCH = 2;         // nodes of each candidate but the first; both as in text_index.py
constexpr size_t SUFFIX_OCCURRENCES = 64;  // latest occurrences of a suffix that are compared

struct Draft {
  std::vector<int32_t> tokens, parents;  // parents: node numbers, -1 for the root
  double score = 0;                      // expected number of accepted tokens
  int64_t match = 0;                     // tokens of the text's end that were found

  int32_t add(int32_t token, int32_t parent) {
    tokens.push_back(token);
    parents.push_back(parent);
    return static_cast<int32_t>(tokens.size()) - 1;
  }

  int32_t child(int32_t parent, int32_t token) const {
    for (size_t i = static_cast<size_t>(parent + 1); i < tokens.size(); i++)
      if (parents[i] == parent && tokens[i] == token) return static_cast<int32_t>(i);
    return -1;
  }

  void write_to(int32_t* out) const {
    out[0] = static_cast<int32_t>(tokens.size());
    out[1] = static_cast<int32_t>(match);
    std::copy(parents.begin(), parents.end(), std::copy(tokens.begin(), tokens.end(), out + 2));
  }
};

// A node that the best-first search may add next.
struct Candidate {
  double probability;  // of its path
  int32_t parent, token;
  int64_t depth;
  size_t first, count;  // its positions in Scratch::candidate_positions
};

struct TokenCount {
  int32_t token;
  size_t count;
};

// Buffers of a lookup, kept for the next one: allocating them would take longer than the search.
struct Scratch {
  std::vector<uint32_t> tags;  // of the text's last n-grams, for each table
  std::vector<Position> occurrences, candidate_positions;
  std::vector<int64_t> match_lengths;
  std::vector<TokenCount> next_tokens;
  std::vector<Candidate> candidates;
  std::vector<size_t> heap;  // of indexes into `candidates`
};
thread_local Scratch scratch;

// Makes drafts from one index.
struct Lookup {
  const TextIndex& index;

  Draft draft_ngrams(const Text& text, int64_t depth, size_t max_nodes) const {
    Draft draft;
    std::vector<Position>&found = scratch.occurrences, &drafted = scratch.candidate_positions;
    drafted.clear();
    index.compute_tags(text, scratch.tags);
    for (size_t i = index.tables.size(); i-- > 0;) {
      found.clear();
      index.find_latest(index.tables[i], scratch.tags[i], text, NGRAM_OCCURRENCES, found);
      if (!found.empty() && !draft.match) draft.match = index.tables[i].length;
      for (Position p : found) {
        if (std::find(drafted.begin(), drafted.end(), p) != drafted.end()) continue;
        drafted.push_back(p);
        size_t most = drafted.size() == 1 ? max_nodes : draft.tokens.size() + NGRAM_BRANCH;
        if (!add_chain(draft, p, depth, most, max_nodes)) return draft;
      }
    }
    return draft;
  }

  // Adds the `depth` tokens from p on, until the draft has `most` nodes. False if it has `max_nodes` and needs more.
  bool add_chain(Draft& draft, Position p, int64_t depth, size_t most, size_t max_nodes) const {
    Position period = index.end - p;  // the text repeats past its end, so that a loop goes on
    int32_t node = -1;
    for (Position step = 0; step < static_cast<Position>(depth); step++) {
      int32_t next_token = index.token(p + step % period), next = draft.child(node, next_token);
      if (next < 0) {
        if (draft.tokens.size() >= max_nodes) return false;
        if (draft.tokens.size() >= most) break;
        next = draft.add(next_token, node);
      }
      node = next;
    }
    return true;
  }

  // Finds the latest occurrences of the text's longest suffix (see text_index.py), and returns its length.
  int64_t find_longest_suffix(const Text& text, std::vector<Position>& found) const {
    int64_t longest = 0;
    found.clear();
    index.compute_tags(text, scratch.tags);
    for (size_t i = index.tables.size(); i-- > 0 && found.empty();)
      index.find_latest(index.tables[i], scratch.tags[i], text, SUFFIX_OCCURRENCES, found);
    std::vector<int64_t>& lengths = scratch.match_lengths;
    lengths.clear();
    for (Position p : found) {
      lengths.push_back(index.common_suffix(text, p, index.rule.depth));
      longest = std::max(longest, lengths.back());
    }
    size_t kept = 0;
    for (size_t i = 0; i < found.size(); i++)
      if (lengths[i] == longest) found[kept++] = found[i];
    found.resize(kept);
    return longest;
  }

  // The likeliest continuations of the text's longest suffix, by best-first search. A token's probability is its
  // share of the occurrences that the path so far has.
  Draft draft_suffixes(Text text, int64_t max_depth, size_t max_nodes) const {
    Draft draft;
    std::vector<Position>& occurrences = scratch.occurrences;
    scratch.candidate_positions.clear();
    scratch.candidates.clear();
    scratch.heap.clear();
    draft.match = find_longest_suffix(text, occurrences);
    if (!draft.match) return draft;
    double allowed = index.rule.factor * static_cast<double>(draft.match) + index.rule.offset;
    if (allowed < static_cast<double>(max_nodes)) max_nodes = static_cast<size_t>(allowed);
    const size_t text_length = text.size();
    Candidate added{1.0, -1, 0, 0, 0, 0};  // the root
    int32_t node = -1;
    while (draft.tokens.size() < max_nodes) {
      if (added.depth < max_depth) {
        auto ends = [&](Position p) { return !index.contains(p) || index.token(p) == TEXT_END; };
        occurrences.erase(std::remove_if(occurrences.begin(), occurrences.end(), ends), occurrences.end());
        if (occurrences.empty()) {  // all texts end here: search as if the path were appended
          text.resize(text_length + static_cast<size_t>(added.depth));
          int32_t up = node;
          for (size_t i = text.size(); up >= 0; up = draft.parents[up]) text[--i] = draft.tokens[up];
          find_longest_suffix(text, occurrences);
        }
        push_candidates(added, node);
      }
      if (scratch.heap.empty()) break;
      std::pop_heap(scratch.heap.begin(), scratch.heap.end(), less_likely);
      added = scratch.candidates[scratch.heap.back()];
      scratch.heap.pop_back();
      auto first = scratch.candidate_positions.begin() + static_cast<std::ptrdiff_t>(added.first);
      occurrences.assign(first, first + static_cast<std::ptrdiff_t>(added.count));
      node = draft.add(added.token, added.parent);
      draft.score += added.probability;
    }
    return draft;
  }

  // The order of the heap: of equally likely candidates the first one wins.
  static bool less_likely(size_t a, size_t b) {
    double first = scratch.candidates[a].probability, second = scratch.candidates[b].probability;
    return first != second ? first < second : a > b;
  }

  // Pushes the tokens that follow the occurrences of `parent`, which is node number `node`.
  void push_candidates(const Candidate& parent, int32_t node) const {
    const std::vector<Position>& occurrences = scratch.occurrences;
    std::vector<TokenCount>& next_tokens = scratch.next_tokens;
    next_tokens.clear();
    for (Position p : occurrences) {
      size_t i = 0;
      while (i < next_tokens.size() && next_tokens[i].token != index.token(p)) i++;
      if (i == next_tokens.size()) next_tokens.push_back({index.token(p), 0});
      next_tokens[i].count++;
    }
    auto probability = [&](const TokenCount& next) {
      return parent.probability * (static_cast<double>(next.count) / static_cast<double>(occurrences.size()));
    };
    auto unlikely = [&](const TokenCount& next) { return probability(next) < index.rule.min_prob; };
    next_tokens.erase(std::remove_if(next_tokens.begin(), next_tokens.end(), unlikely), next_tokens.end());
    std::stable_sort(next_tokens.begin(), next_tokens.end(),
                     [](const TokenCount& a, const TokenCount& b) { return a.count > b.count; });
    std::vector<Position>& positions = scratch.candidate_positions;
    for (const TokenCount& next : next_tokens) {
      scratch.heap.push_back(scratch.candidates.size());
      scratch.candidates.push_back({probability(next), node, next.token, parent.depth + 1, positions.size(), next.count});
      for (Position p : occurrences)
        if (index.token(p) == next.token) positions.push_back(p + 1);
      std::push_heap(scratch.heap.begin(), scratch.heap.end(), less_likely);
    }
  }
};

template <class F>
int status_of(void* index, const F& work) {
  try {
    work(*static_cast<TextIndex*>(index));
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

void* pl_index_open(const pl_lookup* rule) {
  try {
    return new TextIndex(*rule);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void pl_index_close(void* index) { delete static_cast<TextIndex*>(index); }

int pl_index_extend(void* index, const int32_t* tokens, int64_t count) {
  return status_of(index, [&](TextIndex& texts) { texts.append(tokens, count); });
}

int pl_index_end_text(void* index) {
  return status_of(index, [](TextIndex& texts) { texts.finish_text(); });
}

int64_t pl_index_drop_oldest(void* index) { return static_cast<TextIndex*>(index)->drop_oldest_text(); }

int64_t pl_index_copy_texts(void* index, int32_t* out) {
  const TextIndex& texts = *static_cast<TextIndex*>(index);
  for (Position p = texts.begin; out && p != texts.end; p++) *out++ = texts.token(p);
  return static_cast<Position>(texts.end - texts.begin);
}

int64_t pl_index_bytes(void* index) {
  const TextIndex& texts = *static_cast<TextIndex*>(index);
  size_t bytes = sizeof(TextIndex) + texts.stream.size() * sizeof(int32_t);
  for (const NgramTable& table : texts.tables)
    bytes += table.buckets.size() * sizeof(Bucket) + table.previous.size() * sizeof(Position);
  return static_cast<int64_t>(bytes);
}

int pl_draft_ngrams(void* index, const int32_t* query, int32_t* draft) {
  return status_of(index, [&](TextIndex& texts) {
    Text text = texts.read_query(query);
    Lookup{texts}.draft_ngrams(text, query[0], static_cast<size_t>(query[1])).write_to(draft);
  });
}

int pl_draft_suffixes(void* index, void* memory, const int32_t* query, int32_t* draft) {
  return status_of(index, [&](TextIndex& texts) {
    Text text = texts.read_query(query);
    Draft best = Lookup{texts}.draft_suffixes(text, query[0], static_cast<size_t>(query[1]));
    if (memory) {
      const TextIndex& other_texts = *static_cast<TextIndex*>(memory);
      Draft other = Lookup{other_texts}.draft_suffixes(text, query[0], static_cast<size_t>(query[1]));
      if (other.score > best.score) best = std::move(other);
    }
    best.write_to(draft);
  });
}
}
